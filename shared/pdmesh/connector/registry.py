"""Connectors by name: the one place that knows which exist."""

from collections.abc import Callable

from pdmesh.connector.base import WorkerConnector
from pdmesh.connector.shm import ShmConnector
from pdmesh.errors import ConfigError
from pdmesh.security import MeshSecret


def make_worker_connectors(
    names: list[str], *, peer_id: str, secret: MeshSecret, on_loopback: bool = False
) -> dict[str, WorkerConnector]:
    """Make the worker's halves, in order of preference. `peer_id` is this process's own `engine_id@epoch`.

    `on_loopback` keeps data planes of their own off every other network.

    Raises ConfigError for an unknown name or a connector whose package is not installed; then none stays open.
    """
    made: dict[str, WorkerConnector] = {}
    try:
        for name in names:
            if name not in _MAKERS:
                raise ConfigError(f"connector {name!r} does not exist; there are {', '.join(_MAKERS)}")
            if name not in made:
                made[name] = _MAKERS[name](peer_id, secret, on_loopback)
    except BaseException:
        for connector in made.values():
            connector.close()
        raise
    return made


def _make_shm(peer_id: str, secret: MeshSecret, on_loopback: bool) -> WorkerConnector:
    return ShmConnector(peer_id, secret)


def _make_nixl(peer_id: str, secret: MeshSecret, on_loopback: bool) -> WorkerConnector:
    from pdmesh.connector.nixl import NixlConnector

    return NixlConnector(peer_id, secret, on_loopback=on_loopback)


def _make_grpc(peer_id: str, secret: MeshSecret, on_loopback: bool) -> WorkerConnector:
    from pdmesh.connector.grpc import GrpcConnector

    return GrpcConnector(peer_id, secret)


_MAKERS: dict[str, Callable[[str, MeshSecret, bool], WorkerConnector]] = {
    "shm": _make_shm,
    "nixl": _make_nixl,
    "grpc": _make_grpc,
}
