"""What an engine can refuse before it loads: model, architecture, context, memory, secret, ports, KV events, plug-ins."""

import asyncio
import importlib.util
import logging
from importlib.metadata import entry_points

from pdmesh.config import EngineConfig
from pdmesh.engine.batch_defaults import DeviceInfo, check_batch
from pdmesh.engine.compute_threads import resolve_threads
from pdmesh.engine.kv_events_config import check_addresses, kv_events_config
from pdmesh.engine.logits_processors import ENTRY_POINT_GROUP
from pdmesh.engine.model_check import check_model
from pdmesh.engine.processor_check import IMPORT_FAILED
from pdmesh.errors import ConfigError
from pdmesh.lifecycle import check_ports
from pdmesh.parent import tied_command
from pdmesh.security import MeshSecret

log = logging.getLogger(__name__)

# They may bring torch along.
IMPORT_TIMEOUT_S = 50.0


async def check_engine(config: EngineConfig) -> None:
    """Raise ConfigError for what cannot work; log what has no effect."""
    MeshSecret.load(config)
    resolve_threads(config)
    check_processors(config.logits_processors)
    # Every backend there is computes on CPUs.
    check_batch(config, DeviceInfo(), offline=False, max_model_len=config.max_model_len or 1)
    if config.kvcache and not config.enable_prefix_caching:
        log.warning(
            "kvcache %s is not used: without enable-prefix-caching nothing is looked up or stored", config.kvcache
        )
    check_ports(config.host, port=config.port, grpc_port=config.grpc_port)
    events = kv_events_config(config)
    if events is not None:
        check_addresses(events, config.host)
    # In a thread: a Hugging Face id may have to be downloaded.
    await asyncio.to_thread(check_model, config)
    if config.check_config:
        # A start does the same at once in its core; here nobody else would.
        await import_processors(config.logits_processors)


async def import_processors(names: list[str]) -> None:
    """Import logits processors in a process of their own, as they may bring torch along. Raises ConfigError."""
    if not names and not entry_points(group=ENTRY_POINT_GROUP):
        return
    process = await asyncio.create_subprocess_exec(
        *tied_command("pdmesh.engine.processor_check", *names),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.DEVNULL,
    )
    try:
        async with asyncio.timeout(IMPORT_TIMEOUT_S):
            told, _ = await process.communicate()
    except TimeoutError:
        raise ConfigError(f"logits-processors: importing them takes more than {IMPORT_TIMEOUT_S:.0f} s") from None
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    if process.returncode:
        lines = told.decode(errors="replace").strip().splitlines()
        ended = f"logits-processors: importing them ended with code {process.returncode}"
        raise ConfigError(lines[-1] if lines and process.returncode == IMPORT_FAILED else ended)


def check_processors(names: list[str]) -> None:
    """Raise ConfigError for a logits processor of a package that is not installed; the core, which loads it, sees the rest."""
    for name in names:
        package = name.partition(":")[0].partition(".")[0]
        if not _is_installed(package):
            raise ConfigError(f"logits-processors: {name} names the package {package!r}, which is not installed here")


def _is_installed(package: str) -> bool:
    try:
        return importlib.util.find_spec(package) is not None
    except ValueError:  # of a module that was not imported from anywhere, such as __main__
        return False
