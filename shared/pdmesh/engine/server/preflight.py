"""What an engine can refuse before it loads: model, architecture, context, memory, secret, ports, KV events, plug-ins."""

import asyncio
import importlib.util
import logging

from pdmesh.config import EngineConfig
from pdmesh.engine.kv_events_config import check_addresses, kv_events_config
from pdmesh.engine.model_check import check_model
from pdmesh.errors import ConfigError
from pdmesh.lifecycle import check_ports
from pdmesh.security import MeshSecret

log = logging.getLogger(__name__)


async def check_engine(config: EngineConfig) -> None:
    """Raise ConfigError for what cannot work; log what has no effect."""
    MeshSecret.load(config)
    check_processors(config.logits_processors)
    if config.kvcache and not config.enable_prefix_caching:
        log.warning("kvcache %s is not used: without enable-prefix-caching nothing is looked up or stored", config.kvcache)
    check_ports(config.host, port=config.port, grpc_port=config.grpc_port)
    events = kv_events_config(config)
    if events is not None:
        check_addresses(events, config.host)
    # In a thread: a Hugging Face id may have to be downloaded.
    await asyncio.to_thread(check_model, config)


def check_processors(names: list[str]) -> None:
    """Raise ConfigError for a logits processor of a package that is not installed; the core, which loads it, sees the rest."""
    for name in names:
        package = name.partition(":")[0].partition(".")[0]
        if importlib.util.find_spec(package) is None:
            raise ConfigError(f"logits-processors: {name} names the package {package!r}, which is not installed here")
