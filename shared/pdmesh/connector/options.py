"""What `--connector-options` says: a JSON object with an object of options for each connector, checked before anything starts."""

from collections.abc import Sequence
from typing import Any, Literal

from pydantic import Field, ValidationError

from pdmesh.config import Settings
from pdmesh.config.settings import Size
from pdmesh.engine.json_setting import parse_object
from pdmesh.errors import ConfigError

SETTING = "connector-options"
MAX_BYTES = 1 << 40


class ConnectorOptions(Settings):
    """What every connector has."""

    throttle_bytes_s: Size = Field(default=0, ge=0, le=MAX_BYTES)
    """Most bytes per second that all pulls of this process together take over this connector, so that others may use the
    link too; 0: no limit."""


class ShmOptions(ConnectorOptions):
    """Options of `shm`."""

    # Between two copies a pull may be cancelled: 8 MiB take a millisecond or two.
    copy_bytes: Size = Field(default=8 << 20, ge=4096, le=1 << 30)
    """Most bytes copied at once; between two copies other pulls have a turn."""


class GrpcOptions(ConnectorOptions):
    """Options of `grpc`."""

    num_threads: int = Field(default=4, ge=1, le=64)
    """Pulls from one peer carried out at the same time; others wait for one of them to end."""
    chunk_bytes: Size = Field(default=4 << 20, ge=4096, le=32 << 20)
    """Most bytes of blocks asked for in one message; the owner may send less, and a block larger than this comes alone."""


class NativeOptions(ConnectorOptions):
    """What every transport has that runs in a helper process."""

    @property
    def agent_threads(self) -> int:
        """Threads that its agent is made with; 0: its own default."""
        return 0

    @property
    def agent_host(self) -> str:
        """Address under which other agents reach its agent; empty: the agent finds out, or does not need one."""
        return ""

    @property
    def variables(self) -> dict[str, str]:
        """What its helper process finds in its environment, whatever the service's own says."""
        return {}


class NixlOptions(NativeOptions):
    """Options of `nixl`. Empty or 0: as NIXL and UCX have it, or as UCX_ variables of the service's environment say."""

    backends: list[Literal["UCX"]] = Field(default=["UCX"], min_length=1, max_length=1)
    """NIXL's plug-ins; UCX is the one that reads other hosts' memory here."""
    num_threads: int = Field(default=0, ge=0, le=64)
    """Threads of the UCX plug-in that share a read's blocks; 0: none beside the one that makes progress. Each has a connection of
    its own, so with them a read of a peer that is lost ends with the helper process."""
    ucx_tls: str = Field(default="", max_length=1024)
    """Transports that UCX may use, as UCX_TLS has them: `rc,sm`, or `^cuda` for all but that."""
    ucx_net_devices: str = Field(default="", max_length=1024)
    """Network devices that UCX may use, as UCX_NET_DEVICES has them: `mlx5_0:1`."""

    @property
    def agent_threads(self) -> int:
        return self.num_threads

    @property
    def variables(self) -> dict[str, str]:
        wanted = {"UCX_TLS": self.ucx_tls, "UCX_NET_DEVICES": self.ucx_net_devices}
        return {name: value for name, value in wanted.items() if value}


class MooncakeOptions(NativeOptions):
    """Options of `mooncake`."""

    host: str = Field(default="", max_length=253)
    """Address under which peers reach this host's Transfer Engine; empty: the one that the default route leaves from."""
    num_connections: int = Field(default=8, ge=1, le=64)
    """TCP connections that a pull may use at the same time."""

    @property
    def agent_threads(self) -> int:
        return self.num_connections

    @property
    def agent_host(self) -> str:
        return self.host


class UcxxOptions(NativeOptions):
    """Options of `ucxx`. Empty: as UCX has it, or as UCX_ variables of the service's environment say."""

    ucx_tls: str = Field(default="", max_length=1024)
    """Transports that UCX may use, as UCX_TLS has them."""
    ucx_net_devices: str = Field(default="", max_length=1024)
    """Network devices that UCX may use, as UCX_NET_DEVICES has them."""

    @property
    def variables(self) -> dict[str, str]:
        wanted = {"UCX_TLS": self.ucx_tls, "UCX_NET_DEVICES": self.ucx_net_devices}
        return {name: value for name, value in wanted.items() if value}


class FileOptions(ConnectorOptions):
    """Options of `file`."""

    path: str = Field(default="", max_length=4096)
    """Directory on a file system that owners and consumers share; each has its own mount of it. Has to be given."""
    num_threads: int = Field(default=2, ge=1, le=64)
    """Pulls carried out at the same time; others wait for one of them to end."""


OPTIONS: dict[str, type[ConnectorOptions]] = {
    "shm": ShmOptions,
    "nixl": NixlOptions,
    "grpc": GrpcOptions,
    "mooncake": MooncakeOptions,
    "ucxx": UcxxOptions,
    "file": FileOptions,
}
"""By connector."""


def connector_options(text: str) -> dict[str, ConnectorOptions]:
    """Return the options of every connector that the JSON names. Raises ConfigError that names connector, key and range."""
    if not text.strip():
        return {}
    return {name: _checked(name, values) for name, values in parse_object(SETTING, text).items()}


def unused_options(text: str, connectors: Sequence[str]) -> list[str]:
    """Say, for the log, which connectors have options and are not used."""
    unused = [name for name in connector_options(text) if name not in connectors]
    return [f"{SETTING}: {name} has no effect: connector is {','.join(connectors)}" for name in unused]


def _checked(name: str, values: Any) -> ConnectorOptions:
    cls = OPTIONS.get(name)
    if cls is None:
        raise ConfigError(f"{SETTING}: there is no connector {name!r} with options; those are {', '.join(OPTIONS)}")
    if not isinstance(values, dict):
        raise ConfigError(f"{SETTING}: {name}: {values!r} is not a JSON object")
    if unknown := sorted(set(values) - set(cls.model_fields)):
        known = ", ".join(cls.model_fields)
        raise ConfigError(f"{SETTING}: unknown key {name}.{unknown[0]}; the keys there are {known}")
    try:
        # Strict: JSON has numbers, so "4" is none.
        return cls.model_validate(values, strict=True)
    except ValidationError as exc:
        first = exc.errors()[0]
        key = ".".join(str(part) for part in (name, *first["loc"]))
        raise ConfigError(f"{SETTING}: {key}: {first['msg']} (got {first['input']!r})") from None
