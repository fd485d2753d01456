"""Answers the core that asks where a preempted request's KV may be had: the tier, then the prefill whose offer is still kept;
when neither has it, a proxy that can have it computed elsewhere gets the request back, and else it is computed again here.

The core's sequence waits meanwhile, so every question is answered, and soon.
"""

import asyncio
import logging

from pdmesh.engine.messages import NeedsSource, SetSource
from pdmesh.engine.server.core_peers import Core
from pdmesh.engine.server.endings import Endings
from pdmesh.engine.server.fetches import Tasks
from pdmesh.engine.server.metrics import EngineMetrics
from pdmesh.engine.server.requests import RequestTable, RunningRequest
from pdmesh.engine.server.sources import Found, Sources
from pdmesh.errors import Preempted

log = logging.getLogger(__name__)

# A source that takes longer to find is worse than computing.
ANSWER_TIMEOUT_S = 3.0
ELSEWHERE = "prefill"


class Returns:
    """Finds sources for requests that the core has preempted."""

    def __init__(
        self,
        *,
        table: RequestTable,
        core: Core,
        sources: Sources,
        endings: Endings,
        tasks: Tasks,
        metrics: EngineMetrics,
    ) -> None:
        self._table = table
        self._core = core
        self._sources = sources
        self._endings = endings
        self._tasks = tasks
        self._metrics = metrics

    def asked(self, need: NeedsSource) -> None:
        """Look for a source, in a task of its own."""
        self._tasks.create_task(self._answer(need))

    async def _answer(self, need: NeedsSource) -> None:
        running = self._table.get(need.request_id)
        if running is None:
            # Its end has been told to the core, or is the core's own word.
            return
        found = Found()
        try:
            async with asyncio.timeout(min(ANSWER_TIMEOUT_S, running.remaining_s)):
                found = await self._sources.find_again(running, need)
        except TimeoutError:
            log.info("no source of %s was found within %.0f s", running.request.request_id, ANSWER_TIMEOUT_S)
        except Exception:
            log.exception("looking for a source of %s failed", running.request.request_id)
            self._metrics.unexpected_errors.inc("returns")
        if found.source is None and self._may_hand_back(running):
            self._metrics.preempted.inc(ELSEWHERE)
            self._endings.fail(running, Preempted("the request lost its KV here; another prefill is to compute it"))
            return
        self._core.send(SetSource(request_id=need.request_id, choice=need.choice, source=found.source, kind=found.kind))

    def _may_hand_back(self, running: RunningRequest) -> bool:
        """Choices that run would be stopped for the one that does not."""
        is_running = self._table.get(running.core_id) is running
        return is_running and running.request.hand_back and len(running.open_choices) == 1
