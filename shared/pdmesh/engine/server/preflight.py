"""What an engine can refuse before it loads: model, architecture, context, memory, secret, ports, KV events, plug-ins."""

import asyncio
import importlib.util
import logging
from importlib.metadata import entry_points

from pdmesh.config import EngineConfig
from pdmesh.connector.options import unused_options
from pdmesh.connector.registry import check_installed
from pdmesh.engine.batch_defaults import DeviceInfo, check_batch
from pdmesh.engine.compute_threads import resolve_threads
from pdmesh.engine.host_memory import usable_cores
from pdmesh.engine.kv_events_config import check_addresses, kv_events_config
from pdmesh.engine.kv_transfer_config import kv_transfer_lines, resolve_kv_transfer
from pdmesh.engine.logits_processors import ENTRY_POINT_GROUP
from pdmesh.engine.model_check import check_model
from pdmesh.engine.processor_check import IMPORT_FAILED
from pdmesh.engine.server.identity import Role, narrowed_role
from pdmesh.errors import ConfigError
from pdmesh.lifecycle import check_ports
from pdmesh.parent import tied_command
from pdmesh.security import MeshSecret
from pdmesh_kernels.cpu.library import LibraryError, choose_isa, is_built, load

log = logging.getLogger(__name__)

# They may bring torch along.
IMPORT_TIMEOUT_S = 50.0


async def check_engine(config: EngineConfig, role: Role = "both") -> None:
    """Raise ConfigError for what cannot work; log what has no effect, and what vLLM's JSON became."""
    config = resolve_kv_transfer(config)
    narrowed_role(role, config.kv_role)
    for line in [*kv_transfer_lines(config), *unused_options(config.connector_options, config.connector)]:
        log.info("%s", line)
    MeshSecret.load(config)
    check_installed(config.connector)
    num_threads, num_cores = resolve_threads(config).count, usable_cores()
    if num_threads > num_cores:
        log.warning(
            "%d compute threads are more than the cores that this process may use, which are %d: each step takes longer for it",
            num_threads,
            num_cores,
        )
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
    if config.cpu_isa != "auto" and is_built():
        await asyncio.to_thread(check_isa, config.cpu_isa)
    if config.check_config:
        # A start does the same at once in its core; here nobody else would.
        await import_processors(config.logits_processors)


def check_isa(name: str) -> None:
    """Raise ConfigError for an instruction set that this processor does not have."""
    try:
        choose_isa(load(), name)
    except LibraryError as exc:
        raise ConfigError(str(exc)) from None


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
