"""What the server process tells its core at birth, as JSON on standard input. Imports no torch."""

import msgspec

from pdmesh.config import EngineConfig


class Launch(msgspec.Struct, frozen=True, kw_only=True):
    """Everything a core needs; it reads no flags, files or environment of its own."""

    config_json: str
    """An EngineConfig."""
    engine_id: str
    epoch: int
    pool_fd: int
    """Inherited memfd, still empty, that becomes the KV pool."""
    inbox: str
    """ZMQ address the core receives from."""
    outbox: str
    """ZMQ address the core sends to."""
    offline: bool = False
    """No clients wait for single tokens: the default batch is larger."""

    @property
    def peer_id(self) -> str:
        return f"{self.engine_id}@{self.epoch}"

    @property
    def config(self) -> EngineConfig:
        return EngineConfig.model_validate_json(self.config_json)


def engine_config_json(config: EngineConfig) -> str:
    """Return the engine's part of a service's configuration, whatever the service adds to it."""
    return config.model_dump_json(include=set(EngineConfig.model_fields))
