"""What an engine can refuse before it loads anything: model, architecture, context, memory, secret, ports, KV events."""

import asyncio

from pdmesh.config import EngineConfig
from pdmesh.engine.kv_events_config import check_addresses, kv_events_config
from pdmesh.engine.model_check import check_model
from pdmesh.lifecycle import check_ports
from pdmesh.security import MeshSecret


async def check_engine(config: EngineConfig) -> None:
    """Raise ConfigError for what cannot work."""
    MeshSecret.load(config)
    check_ports(config.host, port=config.port, grpc_port=config.grpc_port)
    events = kv_events_config(config)
    if events is not None:
        check_addresses(events, config.host)
    # In a thread: a Hugging Face id may have to be downloaded.
    await asyncio.to_thread(check_model, config)
