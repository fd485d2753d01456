"""A line of statistics every ten seconds, while there is anything to say."""

import asyncio
import logging

from pdmesh.engine.server.load import LoadBoard

log = logging.getLogger(__name__)

INTERVAL_S = 10.0


async def log_stats(board: LoadBoard) -> None:
    """Log the core's progress until cancelled; silent while no step runs."""
    seen = board.stats.steps
    while True:
        version = board.version
        await board.newer(version)
        await asyncio.sleep(INTERVAL_S)
        stats = board.stats
        if stats.steps == seen:
            continue
        hits = stats.prefix_cache_hits / stats.prefix_cache_queries if stats.prefix_cache_queries else 0.0
        log.info(
            "steps=%d (%.1f/s) running=%d waiting=%d kv_usage=%.1f%% prefix_hits=%.1f%% preemptions=%d offers=%d",
            stats.steps,
            (stats.steps - seen) / INTERVAL_S,
            stats.num_running,
            stats.num_waiting,
            100 * stats.num_blocks_used / max(1, stats.num_blocks),
            100 * hits,
            stats.num_preemptions,
            board.num_offers,
        )
        seen = stats.steps
