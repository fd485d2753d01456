"""Connectors by name: the one place that knows which exist."""

from collections.abc import Callable, Mapping, Sequence

from pdmesh.connector.base import WorkerConnector
from pdmesh.connector.native_agent import AGENTS
from pdmesh.connector.options import (
    OPTIONS,
    ConnectorOptions,
    FileOptions,
    GrpcOptions,
    MooncakeOptions,
    NixlOptions,
    ShmOptions,
    UcxxOptions,
)
from pdmesh.connector.shm import ShmConnector
from pdmesh.errors import ConfigError
from pdmesh.security import MeshSecret


def make_worker_connectors(
    names: list[str],
    *,
    peer_id: str,
    secret: MeshSecret,
    on_loopback: bool = False,
    options: Mapping[str, ConnectorOptions] | None = None,
) -> dict[str, WorkerConnector]:
    """Make the worker's halves, in order of preference. `peer_id` is this process's own `engine_id@epoch`.

    `on_loopback` keeps data planes of their own off every other network; connectors without `options` have the defaults.

    Raises ConfigError for an unknown name or a connector whose package is not installed; then none stays open.
    """
    made: dict[str, WorkerConnector] = {}
    try:
        for name in names:
            if name not in _MAKERS:
                raise ConfigError(f"connector {name!r} does not exist; there are {', '.join(_MAKERS)}")
            if name not in made:
                made[name] = _MAKERS[name](peer_id, secret, on_loopback, (options or {}).get(name) or OPTIONS[name]())
    except BaseException:
        for connector in made.values():
            connector.close()
        raise
    return made


def check_installed(names: Sequence[str]) -> None:
    """Raise ConfigError for a connector whose package is not installed. Starts nothing."""
    natives = [name for name in names if name in AGENTS]
    for connector in make_worker_connectors(
        natives, peer_id="check@0", secret=MeshSecret(""), on_loopback=True
    ).values():
        connector.close()


def _make_shm(peer_id: str, secret: MeshSecret, on_loopback: bool, options: ConnectorOptions) -> WorkerConnector:
    assert isinstance(options, ShmOptions)
    return ShmConnector(peer_id, secret, options)


def _make_nixl(peer_id: str, secret: MeshSecret, on_loopback: bool, options: ConnectorOptions) -> WorkerConnector:
    from pdmesh.connector.nixl import NixlConnector

    assert isinstance(options, NixlOptions)
    return NixlConnector(peer_id, secret, options, on_loopback=on_loopback)


def _make_mooncake(peer_id: str, secret: MeshSecret, on_loopback: bool, options: ConnectorOptions) -> WorkerConnector:
    from pdmesh.connector.mooncake import MooncakeConnector

    assert isinstance(options, MooncakeOptions)
    return MooncakeConnector(peer_id, secret, options, on_loopback=on_loopback)


def _make_grpc(peer_id: str, secret: MeshSecret, on_loopback: bool, options: ConnectorOptions) -> WorkerConnector:
    from pdmesh.connector.grpc import GrpcConnector

    assert isinstance(options, GrpcOptions)
    return GrpcConnector(peer_id, secret, options)


def _make_ucxx(peer_id: str, secret: MeshSecret, on_loopback: bool, options: ConnectorOptions) -> WorkerConnector:
    from pdmesh.connector.ucxx import UcxxConnector

    assert isinstance(options, UcxxOptions)
    return UcxxConnector(peer_id, secret, options, on_loopback=on_loopback)


def _make_file(peer_id: str, secret: MeshSecret, on_loopback: bool, options: ConnectorOptions) -> WorkerConnector:
    from pdmesh.connector.file import FileConnector

    assert isinstance(options, FileOptions)
    return FileConnector(peer_id, secret, options)


_MAKERS: dict[str, Callable[[str, MeshSecret, bool, ConnectorOptions], WorkerConnector]] = {
    "shm": _make_shm,
    "nixl": _make_nixl,
    "grpc": _make_grpc,
    "mooncake": _make_mooncake,
    "ucxx": _make_ucxx,
    "file": _make_file,
}
