"""The engine core's process, started tied to its parent (`pdmesh.parent`), with a `Launch` as JSON on standard input.

Its life: load the model, size and bind the KV pool, register it with the connectors, say that it is
ready, serve until Shutdown. What it cannot do becomes a CoreFailed.
"""

import contextlib
import functools
import gc
import logging
import signal
import sys
from collections.abc import Iterator

import msgspec

from pdmesh.config import EngineConfig
from pdmesh.connector.base import PushConnector, WorkerConnector
from pdmesh.connector.options import connector_options
from pdmesh.connector.pages import PagesAhead
from pdmesh.connector.pool import KVPool, PoolShape, size_pool_file
from pdmesh.connector.registry import make_worker_connectors
from pdmesh.connector.staging import NUM_LANES, StagingArea
from pdmesh.engine.backend import Backend, ModelInfo, ProgressCallback
from pdmesh.engine.backends import ChosenBackend, make_backend
from pdmesh.engine.batch_defaults import resolve_batch
from pdmesh.engine.block_hash import BlockHasher
from pdmesh.engine.block_key import root_key
from pdmesh.engine.block_pool import BlockPool
from pdmesh.engine.compute_threads import resolve_threads
from pdmesh.engine.core import Core
from pdmesh.engine.executor import Executor
from pdmesh.engine.host_memory import available_bytes
from pdmesh.engine.kv_events import KVEventLog
from pdmesh.engine.kv_events_config import make_event_log
from pdmesh.engine.kv_groups import KVGroup
from pdmesh.engine.kv_manager import KVManager
from pdmesh.engine.launch import Launch
from pdmesh.engine.links import Links
from pdmesh.engine.logits_processors import LogitsProcessor, check_processors, load_processors, make_processors
from pdmesh.engine.mailbox import Mailbox, open_mailbox
from pdmesh.engine.messages import CoreFailed, CoreProgress, CoreReady
from pdmesh.engine.runner import Runner
from pdmesh.engine.scheduler import Scheduler
from pdmesh.engine.self_pull import SelfPulls
from pdmesh.engine.sizing import Sizes, kv_groups, measure_pool_bytes, resolve_limits, resolve_sizes
from pdmesh.errors import ConfigError, InternalError, MeshError
from pdmesh.logging import setup_logging
from pdmesh.protocol.layout import Layout
from pdmesh.security import MeshSecret
from pdmesh_kernels.cpu.library import LibraryError
from pdmesh_kernels.sample_scan import Scanner, make_scanner

log = logging.getLogger(__name__)

# The thread that the device waits for gets Python's lock that soon, should the other compute for longer (default: 5 ms).
SWITCH_INTERVAL_S = 0.0002


def main() -> int:
    """Live as a core. Returns the exit code: 0 told to stop, 1 failed."""
    # The server ends its core with a message, so that requests are told; a terminal's Ctrl-C reaches both.
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    launch = msgspec.json.decode(sys.stdin.buffer.read(), type=Launch)
    config = launch.config
    setup_logging(f"{launch.engine_id}-core", config.log_level, config.log_format)
    with open_mailbox(launch.inbox, launch.outbox) as mailbox:
        try:
            _serve(launch, config, mailbox)
        except MeshError as exc:
            mailbox.send(CoreFailed(code=exc.code, message=exc.message))
            return 1
        except Exception as exc:  # the process's top
            log.exception("the engine core failed")
            mailbox.send(CoreFailed(code=InternalError.__name__, message=f"{type(exc).__name__}: {exc}"))
            return 1
    return 0


class _Progress(ProgressCallback):
    """Passes the backend's progress on to the server."""

    def __init__(self, mailbox: Mailbox) -> None:
        self._mailbox = mailbox

    def __call__(self, stage: str, fraction: float) -> None:
        self._mailbox.send(CoreProgress(stage=stage, fraction=fraction))


def _serve(launch: Launch, config: EngineConfig, mailbox: Mailbox) -> None:
    # Before the weights: what cannot be imported is told at once.
    processors = load_processors(config.logits_processors)
    chosen = make_backend(config)
    backend = chosen.backend
    with contextlib.closing(backend):
        info = backend.load(config.model, config.dtype, config.block_size or None, _Progress(mailbox))
        longest = min(config.max_model_len or info.max_model_len, info.max_model_len)
        config = resolve_batch(config, backend.device, offline=launch.offline, max_model_len=longest)
        sizes = resolve_sizes(config, info, measure_pool_bytes(config, backend))
        with (
            _bound_pool(config, launch.pool_fd, backend, info, sizes) as pool,
            _links(launch, config, pool) as links,
            contextlib.closing(_executor(config, backend, info, sizes, processors)) as executor,
        ):
            groups = kv_groups(info)
            events = make_event_log(config, groups)
            kv = _kv_manager(config, info, pool, groups, events)
            scheduler = Scheduler(
                kv,
                resolve_limits(config, info, sizes),
                functools.partial(check_processors, processors) if processors else None,
            )
            self_pulls, summed = SelfPulls(kv, pool), pool if config.kv_checksums else None
            core = Core(scheduler, executor, links.links, mailbox, mailbox.send, events, self_pulls, summed)
            mailbox.send(_ready(config, chosen, info, sizes, pool, links))
            # The model's objects live as long as the process: the collector need not look at them again.
            gc.collect()
            gc.freeze()
            core.run()


@contextlib.contextmanager
def _bound_pool(config: EngineConfig, fd: int, backend: Backend, info: ModelInfo, sizes: Sizes) -> Iterator[KVPool]:
    shape = PoolShape(sizes.num_blocks, info.groups[0].block_bytes)
    with contextlib.closing(_open_pool(fd, shape)) as pool, contextlib.ExitStack() as closing:
        backend.bind(pool)
        pool.staging = _staging(config, info)
        if pool.staging is not None:
            closing.callback(pool.staging.close)
        closing.enter_context(PagesAhead(pool))
        yield pool


def _staging(config: EngineConfig, info: ModelInfo) -> StagingArea | None:
    """Make room for blocks of other layouts, where they can be converted and are wanted."""
    lane_bytes = config.kv_staging_bytes // NUM_LANES
    if not _told_layouts(info) or not config.kv_staging_bytes or config.kv_role == "kv_producer":
        return None
    try:
        return StagingArea(lane_bytes)
    except (OSError, ValueError, OverflowError) as exc:
        raise ConfigError(f"kv-staging-bytes {config.kv_staging_bytes}: {exc}") from exc


def _open_pool(fd: int, shape: PoolShape) -> KVPool:
    try:
        size_pool_file(fd, shape)
        return KVPool(fd, shape, writable=True)
    except (OSError, MemoryError, OverflowError) as exc:
        raise ConfigError(
            f"kv-cache-memory-bytes: a pool of {shape.total_bytes} bytes cannot be had ({str(exc) or type(exc).__name__}); "
            f"{available_bytes()} bytes of memory are available"
        ) from exc


class _RegisteredLinks(msgspec.Struct, frozen=True):
    links: Links
    metadata: dict[str, bytes]
    push_connectors: list[str]


@contextlib.contextmanager
def _links(launch: Launch, config: EngineConfig, pool: KVPool) -> Iterator[_RegisteredLinks]:
    connectors: dict[str, WorkerConnector] = make_worker_connectors(
        list(config.connector),
        peer_id=launch.peer_id,
        secret=MeshSecret.load(config),
        on_loopback=config.on_loopback,
        options=connector_options(config.connector_options),
    )
    # Registered before anyone watches for metadata that replaces it.
    try:
        metadata = {name: connector.register(pool) for name, connector in connectors.items()}
    except BaseException:
        for connector in connectors.values():
            connector.close()
        raise
    links = Links(connectors, pool)
    with contextlib.closing(links):
        pushing = [name for name, connector in connectors.items() if isinstance(connector, PushConnector)]
        yield _RegisteredLinks(links, metadata, pushing)


def _executor(
    config: EngineConfig, backend: Backend, info: ModelInfo, sizes: Sizes, processors: list[type[LogitsProcessor]]
) -> Executor:
    """Start the thread that computes steps."""
    if not config.async_scheduling:
        log.info(
            "asynchronous scheduling is off (no-async-scheduling): a step is planned when the one before has ended"
        )
    made = make_processors(processors, info.vocab_size, resolve_threads(config).count)
    try:
        runner = Runner(
            backend,
            num_rows=config.max_num_seqs,
            max_model_len=sizes.max_model_len,
            num_groups=len(info.groups),
            block_size=info.groups[0].block_size,
            eos_token_ids=frozenset(info.eos_token_ids),
            processors=made,
            scanner=_scanner(backend, config.cpu_isa),
        )
    except MemoryError as exc:
        raise ConfigError(
            f"max-num-seqs {config.max_num_seqs}: there is no memory for so many rows of {sizes.max_model_len} tokens "
            f"(max-model-len): {exc}; {available_bytes()} bytes are available"
        ) from exc
    return Executor(runner, is_async=config.async_scheduling, on_start=backend.step_thread.take)


def _scanner(backend: Backend, isa: str) -> Scanner | None:
    """The CPU library's sampling, where it can be had; numpy draws the same tokens in some 0.5 ms a row."""
    try:
        # Not for plain torch: whoever asks for that shall not wait for a compiler.
        return make_scanner(isa, may_build=backend.name != "torch")
    except LibraryError as exc:
        log.info("tokens are drawn by numpy: %s", exc)
        return None


def _kv_manager(
    config: EngineConfig, info: ModelInfo, pool: KVPool, groups: list[KVGroup], events: KVEventLog | None
) -> KVManager:
    first = info.groups[0]
    return KVManager(
        groups,
        BlockPool(pool.shape.num_blocks, len(groups), pool, events),
        BlockHasher(config.prefix_caching_hash_algo, config.prefix_caching_hash_seed, first.block_size),
        max_chunk_tokens=config.max_num_batched_tokens,
        tier_root=root_key(info.fingerprint, first.fingerprint, 0),
        enable_prefix_caching=config.enable_prefix_caching,
        events=events,
    )


def _ready(
    config: EngineConfig,
    chosen: ChosenBackend,
    info: ModelInfo,
    sizes: Sizes,
    pool: KVPool,
    links: _RegisteredLinks,
) -> CoreReady:
    return CoreReady(
        model_fingerprint=info.fingerprint,
        layout_fingerprints=[group.fingerprint for group in info.groups],
        weights_fingerprint=info.weights_fingerprint,
        layouts=_told_layouts(info),
        staging_bytes=0 if pool.staging is None else pool.staging.lane_bytes,
        block_size=info.groups[0].block_size,
        num_blocks=sizes.num_blocks,
        block_bytes=pool.shape.block_bytes,
        max_model_len=sizes.max_model_len,
        vocab_size=info.vocab_size,
        eos_token_ids=list(info.eos_token_ids),
        connectors=links.metadata,
        push_connectors=links.push_connectors,
        dtype=info.dtype,
        kv_dtype=info.groups[0].item_dtype,
        quantization=config.quantization,
        backend=chosen.backend.name,
        instruction_set=chosen.backend.instruction_set,
        backend_fallback=chosen.fallback,
        expanded_weights=info.expanded_weights,
        row_invariant=chosen.backend.row_invariant,
        keeps_history=all(not group.window for group in info.groups),
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
    )


def _told_layouts(info: ModelInfo) -> list[Layout]:
    """All groups' or none."""
    layouts = [group.layout for group in info.groups if group.layout is not None]
    return layouts if len(layouts) == len(info.groups) else []


if __name__ == "__main__":
    sys.exit(main())
