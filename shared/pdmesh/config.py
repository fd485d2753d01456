"""Configuration of every service: one frozen pydantic model, filled from flags, environment, TOML and defaults, in that order.

`load_config(DecodeConfig, argv)` reads `--config FILE` (or `PDMESH_CONFIG`), then `PDMESH_<FIELD>` variables, then flags.
A bad value ends in a ConfigError that names field, value and limit; unknown keys and flags are errors. No setting is read
from the environment anywhere else; what is not a setting is: `security` and the supervisor ask XDG_STATE_HOME where this
user's files go, and who starts a process (the supervisor, the NIXL connector's helper) hands its own environment on.
"""

import argparse
import difflib
import os
import tomllib
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Literal, TypeVar, get_args, get_origin

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from pdmesh.errors import ConfigError

LOOPBACK_HOSTS = ("127.0.0.1", "::1", "localhost")


class Settings(BaseModel):
    """Base of all configuration: frozen, no unknown keys, documented by the docstring under each field."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True, validate_default=True)


class ServiceConfig(Settings):
    """What every service has."""

    host: str = "127.0.0.1"
    """Address to bind HTTP and gRPC to. Off loopback the mesh secret is required."""
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


class EngineConfig(ServiceConfig, HttpConfig):
    """An engine service (prefill, decode, or both). Names and defaults are vLLM's where it has them."""

    grpc_port: int = Field(default=8201, ge=0, le=65535)
    """gRPC port for the proxy and for peers; 0: any free one."""
    port: int = Field(default=8200, ge=0, le=65535)
    """HTTP port; 0: any free one."""
    engine_id: str = Field(default="", max_length=64, pattern=r"^[A-Za-z0-9_.-]*$")
    """Name of this engine in the mesh; empty: role and a random suffix."""
    model: str = ""
    """Hugging Face directory or id, or a GGUF file."""
    served_model_name: str = ""
    """Name in the API; empty: derived from `model`."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Weights and KV. auto: the checkpoint's, but float32 on a backend that is not row-invariant below it."""
    backend: Literal["auto", "torch"] = "auto"
    """Device code that runs the model."""
    cpu_threads: int = Field(default=0, ge=0, le=1024)
    """Threads for CPU compute; 0: all cores that this process may use."""
    max_model_len: int = Field(default=0, ge=0)
    """Longest prompt plus output, tokens; 0: the model's own limit."""
    block_size: int = Field(default=0, ge=0, le=1024)
    """Tokens per KV block; 0: the backend's (32 on CPU, 16 on GPU)."""
    performance_mode: Literal["balanced", "interactivity", "throughput"] = "balanced"
    """throughput doubles those of `max_num_seqs` and `max_num_batched_tokens` that are not set; interactivity favours ITL."""
    max_num_seqs: int = Field(default=256, ge=1, le=65536)
    """Rows: most sequences in one step."""
    max_num_active_seqs: int = Field(default=0, ge=0, le=65536)
    """Most sequences admitted into the batch, at most `max_num_seqs`; 0: as many."""
    max_num_batched_tokens: int = Field(default=2048, ge=1, le=1 << 20)
    """Token budget of one step; longer prompts are computed in chunks."""
    long_prefill_token_threshold: int = Field(default=0, ge=0)
    """Most tokens one prompt gets per step while there are other requests; 0: no limit but the budget."""
    long_prefill_token_threshold_adaptive: bool = False
    """Never cut below a fair share: the budget divided by the requests that run or wait."""
    max_num_partial_prefills: int = Field(default=0, ge=0)
    """Most prompts that are computed in part at the same time; 0: no limit."""
    scheduling_policy: Literal["fcfs", "priority"] = "fcfs"
    """fcfs: in order of arrival. priority: lower `priority` first, then in order of arrival."""
    priority_aging_s: float = Field(default=0.0, ge=0, le=86400)
    """With priority: seconds of waiting that outweigh one step of priority, so that nobody starves; 0: strict."""
    async_scheduling: bool = True
    """Plan the next step while the running one samples."""
    stream_interval: int = Field(default=1, ge=1, le=1 << 20)
    """Tokens per streamed message; the first token always goes at once."""
    enable_prefix_caching: bool = True
    """Reuse full blocks of earlier prompts."""
    prefix_caching_hash_algo: Literal["sha256", "sha256_cbor", "xxhash", "xxhash_cbor"] = "sha256"
    """Names of blocks inside this engine and in its KV events, as vLLM makes them; xxhash is faster, but not collision-proof."""
    prefix_caching_hash_seed: str = ""
    """What vLLM takes from PYTHONHASHSEED; empty: its fixed seed, or a random one for xxhash."""
    kv_events_config: str = ""
    """vLLM's JSON, such as {"enable_kv_cache_events": true, "endpoint": "tcp://*:5557"}: publish KV events over ZMQ."""
    logits_processors: list[str] = []
    """Custom logits processors, as `module:Class`, beside those that installed packages name as entry points."""
    reasoning_start_str: str = ""
    """What opens a thinking section; with `reasoning_end_str` it makes `thinking_token_budget` work."""
    reasoning_end_str: str = ""
    """What closes a thinking section, and what is forced when its budget is used up."""
    kv_cache_memory_bytes: int = Field(default=0, ge=0)
    """Size of the KV pool; 0: `gpu_memory_utilization` of free memory, at most 2 GiB on CPU."""
    gpu_memory_utilization: float = Field(default=0.92, gt=0, le=1)
    """Share of the device's memory for weights and KV when `kv_cache_memory_bytes` is 0; on CPU a share of free memory."""
    watermark: float = Field(default=0.0, ge=0, lt=1)
    """Share of blocks kept free when new requests are admitted."""
    max_num_queued_reqs: int = Field(default=4096, ge=1)
    """Most requests waiting, each of their choices counted; one more is a 503 with Retry-After."""
    max_num_queued_tokens: int = Field(default=0, ge=0)
    """Most prompt tokens of requests whose prompt is not computed yet; beyond it is a 503 with Retry-After. 0: no limit."""
    kv_load_failure_policy: Literal["fail", "recompute"] = "fail"
    """When a pull fails: end the request with an error, or compute the prompt here."""
    connector: list[Literal["shm", "nixl", "grpc"]] = ["shm", "grpc"]
    """Ways to exchange KV, in order of preference, comma-separated; the first that both sides can is used."""
    kv_peers: list[str] = []
    """gRPC `host:port` of engines whose KV may be fetched with vLLM's kv_transfer_params; a name stands for every address it
    resolves to. On loopback this user's own engines need not be listed."""
    kv_lease_duration_s: float = Field(default=30.0, gt=0, le=3600)
    """Seconds that a stock `do_remote_decode` offer lives unless fetched. The mesh's own offers have 10 s, renewed."""
    kvcache: str = ""
    """gRPC `host:port` of the kvcache service; empty: no tier."""
    kvcache_lookup_timeout_s: float = Field(default=0.25, gt=0, le=30)
    """Longest wait for a tier lookup before the prompt is computed instead."""


ConfigT = TypeVar("ConfigT", bound=Settings)

ENV_PREFIX = "PDMESH_"
# How alike an unknown name and a known one must be for the one to be a misspelling of the other.
NAME_CUTOFF = 0.8
_POSITIONAL = "positional argument"


def load_config(
    cls: type[ConfigT],
    argv: list[str],
    *,
    prog: str,
    environ: dict[str, str] | None = None,
    positional: str | None = None,
) -> ConfigT:
    """Build a `cls` from `argv`, `environ` (default os.environ) and the TOML file they name.

    `positional` names a field that may also be given without its flag. Raises ConfigError; `--help` exits as usual.
    """
    env = dict(os.environ) if environ is None else environ
    parser = _parser(cls, prog, positional)
    try:
        flags = vars(parser.parse_args(argv))
    except argparse.ArgumentError as exc:
        raise ConfigError(f"{prog}: {exc}") from exc
    given = flags.pop(_POSITIONAL, None)
    if positional and given is not None:
        flags[positional] = flags[positional] or given
    path = flags.pop("config") or env.get("PDMESH_CONFIG", "")
    values = _from_toml(cls, path) if path else {}
    values |= {
        name: _split(cls, name, env[variable(name)]) for name in cls.model_fields if env.get(variable(name), "") != ""
    }
    values |= {name: _split(cls, name, value) for name, value in flags.items() if value is not None}
    try:
        return cls(**values)
    except ValidationError as exc:
        raise ConfigError(f"{prog}: {_one_line(exc)}") from exc


def variable(name: str) -> str:
    """Name of a setting's environment variable."""
    return ENV_PREFIX + name.upper()


def unknown_variables(cls: type[Settings], environ: Iterable[str] | None = None) -> list[str]:
    """One line for each PDMESH_ variable of `environ` (default os.environ) that looks like a misspelt setting of `cls`.

    Others are left alone: they may belong to another service that is started from the same environment.
    """
    given = os.environ if environ is None else environ
    known = ["CONFIG", *map(str.upper, cls.model_fields)]
    lines = []
    for name in sorted(name.removeprefix(ENV_PREFIX) for name in given if name.startswith(ENV_PREFIX)):
        near = [] if name in known else difflib.get_close_matches(name, known, n=1, cutoff=NAME_CUTOFF)
        if near:
            lines.append(f"environment variable {ENV_PREFIX}{name} means nothing here; is it {ENV_PREFIX}{near[0]}?")
    return lines


def _parser(cls: type[Settings], prog: str, positional: str | None) -> argparse.ArgumentParser:
    usage = "%(prog)s [options]" + (f" [{positional.upper()}]" if positional else "")
    parser = argparse.ArgumentParser(
        prog=prog,
        usage=usage,
        description=cls.__doc__,
        epilog=f"Each --some-setting is also the environment variable {variable('some_setting')} and the key some_setting "
        "of the TOML file; a flag wins over the environment, the environment over the file.",
        exit_on_error=False,
        allow_abbrev=False,
    )
    parser.error = _raise_config_error(prog)  # type: ignore[method-assign]
    parser.add_argument("--config", default="", metavar="FILE", help="TOML file with any of the settings below")
    for name, field in cls.model_fields.items():
        flag = "--" + name.replace("_", "-")
        text = (field.description or "").replace("%", "%%")
        default = ",".join(map(str, field.default)) if isinstance(field.default, list) else field.default
        text += "" if default in ("", None) else f" (default: {default})"
        if name == positional:
            # Under a name of its own: argparse writes the default of an absent positional over the flag's value.
            parser.add_argument(_POSITIONAL, metavar=name.upper(), nargs="?", default=None, help=text)
            parser.add_argument(flag, default=None, help=argparse.SUPPRESS)
        elif field.annotation is bool:
            parser.add_argument(flag, action=argparse.BooleanOptionalAction, default=None, help=text)
        else:
            parser.add_argument(flag, default=None, metavar=_metavar(field.annotation), help=text)
    return parser


def _metavar(annotation: Any) -> str:
    """The allowed values where they are few, else VALUE."""
    if get_origin(annotation) is list:
        item = _metavar(get_args(annotation)[0])
        return item if item == "VALUE" else f"{item},..."
    return "|".join(map(str, get_args(annotation))) if get_origin(annotation) is Literal else "VALUE"


def _raise_config_error(prog: str) -> Any:
    def error(message: str) -> None:
        raise ConfigError(f"{prog}: {message}; see {prog} --help")

    return error


def _from_toml(cls: type[Settings], path: str) -> dict[str, Any]:
    try:
        values = tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"config file {path} does not exist") from None
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as exc:
        raise ConfigError(f"config file {path} cannot be read: {exc}") from exc
    unknown = sorted(set(values) - set(cls.model_fields))
    if unknown:
        raise ConfigError(
            f"config file {path}: unknown key {unknown[0]!r}; known keys: {', '.join(sorted(cls.model_fields))}"
        )
    return values


def _split(cls: type[Settings], name: str, value: Any) -> Any:
    """Turn "a,b" into ["a", "b"] for list fields; other values are left to pydantic."""
    is_list = getattr(cls.model_fields[name].annotation, "__origin__", None) is list
    return [part.strip() for part in value.split(",") if part.strip()] if is_list and isinstance(value, str) else value


def _one_line(exc: ValidationError) -> str:
    first = exc.errors()[0]
    field = ".".join(str(part) for part in first["loc"])
    message = first["msg"].removeprefix("Value error, ")
    if not first["loc"]:
        # A check over several fields: its input is all of them, secrets included.
        return message
    shown = "" if field in ("secret", "api_key") else f" (got {first['input']!r})"
    return f"{field.replace('_', '-')}: {message}{shown}"
