"""What all services are configured with, and what all have that speak the OpenAI API."""

import re
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, model_validator

LOOPBACK_HOSTS = ("127.0.0.1", "::1", "localhost")
# As in vLLM: a small letter is a power of 1000, a capital one of 1024.
SIZE_UNITS = {
    **{letter: 1000**power for power, letter in enumerate("kmgt", start=1)},
    **{letter: 1024**power for power, letter in enumerate("KMGT", start=1)},
}


def _size(value: Any) -> Any:
    """Turn "8k" (8000) and "2G" (2 GiB) into numbers; whatever else is left to pydantic."""
    given = re.fullmatch(r"(\d+(?:\.\d+)?)([kmgtKMGT])", value.strip()) if isinstance(value, str) else None
    return int(float(given[1]) * SIZE_UNITS[given[2]]) if given else value


Size = Annotated[int, BeforeValidator(_size)]
"""A number of tokens or bytes that may be written with a unit."""
AutoSize = Annotated[int, BeforeValidator(lambda value: 0 if value == "auto" else _size(value))]
"""A size that may be "auto", which is 0."""


def _distinct(names: list[str]) -> list[str]:
    if twice := next((name for name in names if names.count(name) > 1), ""):
        raise ValueError(f"{twice} is named twice")
    return names


PoolConnector = Literal["shm", "nixl", "grpc", "mooncake", "ucxx"]
"""Ways to exchange KV that read where it lies."""
ConnectorName = Literal[PoolConnector, "file"]
"""All ways to exchange KV; `file` is for offers alone."""
PoolConnectors = Annotated[list[PoolConnector], AfterValidator(_distinct)]
ConnectorNames = Annotated[list[ConnectorName], AfterValidator(_distinct)]


class Settings(BaseModel):
    """Base of all configuration: frozen, no unknown keys, documented by the docstring under each field."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True, validate_default=True)

    @model_validator(mode="before")
    @classmethod
    def _refuse_booleans(cls, values: Any) -> Any:
        """Of a number, `true` would be 1."""
        for name, value in values.items() if isinstance(values, dict) else ():
            field = cls.model_fields.get(name)
            if isinstance(value, bool) and field is not None and field.annotation in (int, float):
                raise ValueError(f"{name.replace('_', '-')}: must be a number, got {str(value).lower()}")
        return values


class TlsConfig(Settings):
    """Mutual TLS between services; without files gRPC is plain."""

    tls_cert: str = ""
    """File with this service's certificate, PEM; with `tls_key` and `tls_ca` all gRPC between services is mutual TLS."""
    tls_key: str = ""
    """File with the private key of `tls_cert`, PEM, without a passphrase."""
    tls_ca: str = ""
    """File with the authorities that sign the mesh's certificates, PEM."""
    tls_server_name: str = Field(default="pdmesh", max_length=253)
    """DNS name that every certificate of the mesh carries; empty: a server's carries the address that peers dial."""

    @model_validator(mode="after")
    def _check_tls(self) -> Self:
        given = {"tls-cert": self.tls_cert, "tls-key": self.tls_key, "tls-ca": self.tls_ca}
        lacking = [name for name, path in given.items() if not path]
        if 0 < len(lacking) < len(given):
            there = next(name for name, path in given.items() if path)
            raise ValueError(f"{there} needs {' and '.join(lacking)} too: mutual TLS takes all three files")
        return self


class ServiceConfig(TlsConfig):
    """What every service has."""

    host: str = "127.0.0.1"
    """Address to bind HTTP and gRPC to. Off loopback the mesh secret or mutual TLS is required."""
    advertise_host: str = ""
    """Address under which peers reach this service; empty: `host`, or the host name when bound to all interfaces."""
    secret: str = Field(default="", repr=False)
    """Mesh secret, at least 16 characters, the same on all services. Empty on loopback: a per-user file is used."""
    secret_file: str = ""
    """File with the mesh secret (Kubernetes mounts one); wins over `secret`."""
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    """Least severe level that is logged."""
    log_format: Literal["text", "json"] = "text"
    """One line of text or one JSON object per record."""
    drain_timeout_s: float = Field(default=30.0, ge=0, le=3600)
    """Seconds that running requests get to finish after SIGTERM; then they are aborted and told so."""
    check_config: bool = False
    """Only check the configuration, as far as that is cheap, and end with code 0, or 2 and one line."""
    notify_fd: int = Field(default=-1, ge=-1)
    """Inherited descriptor to report start-up progress and readiness on, as JSON lines; set by `pdmesh up`."""

    @property
    def on_loopback(self) -> bool:
        """Whether nothing outside this host can connect."""
        return self.host in LOOPBACK_HOSTS


class HttpConfig(Settings):
    """What every service with the OpenAI API has."""

    api_key: list[str] = Field(default=[], repr=False)
    """Keys that clients may use, comma-separated; each is a tenant with a prefix cache of its own. Empty: no check."""
    max_body_bytes: int = Field(default=8 << 20, ge=1024, le=1 << 30)
    """Largest request body; a larger one is a 413."""
    body_timeout_s: float = Field(default=30.0, gt=0, le=3600)
    """Seconds that a request's body may pause while it comes; then it is a 408."""
    request_timeout_s: float = Field(default=600.0, gt=0, le=86400)
    """Seconds a request may take in all; then it fails with 504. Its body has as long to come, before that."""
    max_logprobs: int = Field(default=20, ge=0, le=1000)
    """Most alternatives a request may ask for per token."""
    allowed_origins: list[str] = []
    """CORS origins, comma-separated. Empty: none, as in vLLM."""
    sse_keep_alive_interval_s: float = Field(default=0.0, ge=0, le=3600)
    """Seconds of silence after which a stream gets a `: keep-alive` comment; 0 is off."""
    reasoning_start_str: str = Field(default="", max_length=1024)
    """What opens a thinking section, such as <think>; with `reasoning_end_str` it makes `thinking_token_budget` work."""
    reasoning_end_str: str = Field(default="", max_length=1024)
    """What closes a thinking section, and what is forced when its budget is used up."""

    @model_validator(mode="after")
    def _check_reasoning(self) -> Self:
        if bool(self.reasoning_start_str) != bool(self.reasoning_end_str):
            lacking = "reasoning-end-str" if self.reasoning_start_str else "reasoning-start-str"
            raise ValueError(
                f"{lacking} is empty: a thinking section needs both reasoning-start-str and reasoning-end-str"
            )
        if self.reasoning_start_str and self.reasoning_start_str == self.reasoning_end_str:
            raise ValueError(
                f"reasoning-start-str and reasoning-end-str are both {self.reasoning_start_str!r}: what opens a thinking "
                "section must differ from what closes it"
            )
        return self
