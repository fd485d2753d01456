"""How a request ends in an engine's server: finished, failed or aborted, once, with everything it held let go."""

import logging
import time

from pdmesh.engine.messages import Abort
from pdmesh.engine.server.core_peers import Core
from pdmesh.engine.server.fetches import Fetches
from pdmesh.engine.server.handoff import Handoff
from pdmesh.engine.server.metrics import EngineMetrics
from pdmesh.engine.server.requests import RequestTable, RunningRequest
from pdmesh.errors import DeadlineExceeded, MeshError
from pdmesh.logging import request_id_var
from pdmesh.protocol.messages import ChoiceDelta

log = logging.getLogger(__name__)

FAILED = "error"
ABORTED = "abort"
STOPPED = "stop"


class Endings:
    """Takes requests out of the table."""

    def __init__(
        self, *, table: RequestTable, core: Core, handoff: Handoff, fetches: Fetches, metrics: EngineMetrics
    ) -> None:
        self._table = table
        self._core = core
        self._handoff = handoff
        self._fetches = fetches
        self._metrics = metrics

    def finish(self, running: RunningRequest, *, keep_offer: bool) -> None:
        """All choices have ended in the core; with `keep_offer` its offer is on its way to whoever asked."""
        if self._table.remove(running):
            self._let_go(running, keep_offer=keep_offer)

    def fail(self, running: RunningRequest, error: MeshError) -> None:
        """End every open choice with an error, here and in the core."""
        if self._stop(running, FAILED):
            for choice in sorted(running.open_choices):
                running.sink.put(error_delta(running.request.request_id, choice, error))

    def abort(self, running: RunningRequest, reason: str = ABORTED) -> None:
        """End a request that nobody waits for any more; its sink hears nothing. One that has ended stays as it is."""
        self._stop(running, reason)

    def abort_choice(self, running: RunningRequest, choice: int) -> None:
        """End one choice whose text is complete (a stop string was found); the last one ends the request."""
        if choice not in running.open_choices:
            return
        # A prefill-only choice still ends by the core's word: another one's ticket may have to go with it.
        if not running.request.prefill_only:
            running.open_choices.discard(choice)
        if not running.open_choices:
            self.abort(running, reason=STOPPED)
        elif running.in_core:
            self._core.send(Abort(request_id=running.core_id, choice=choice))

    def overdue(self, running: RunningRequest) -> None:
        """The request's time is up."""
        seconds = running.request.deadline_s
        self.fail(running, DeadlineExceeded(f"the request did not end within its {seconds:.3g} s"))

    def _stop(self, running: RunningRequest, reason: str) -> bool:
        if not self._table.remove(running):
            return False
        running.finish_reason = reason
        if running.submission is not None:
            running.submission.cancel()
        if running.in_core:
            self._core.send(Abort(request_id=running.core_id))
        self._let_go(running, keep_offer=False)
        return True

    def _let_go(self, running: RunningRequest, *, keep_offer: bool) -> None:
        self._fetches.abandon(running)
        if running.offer_id:
            (self._handoff.tell if keep_offer else self._handoff.release)(running.offer_id)
        self._report(running)

    def _report(self, running: RunningRequest) -> None:
        request, metrics = running.request, self._metrics
        duration_s = time.monotonic() - running.arrived_s
        metrics.request_success.inc(running.finish_reason)
        metrics.e2e.observe(duration_s)
        metrics.request_prompt_tokens.observe(len(request.token_ids))
        metrics.request_generation_tokens.observe(running.num_generated)
        metrics.params_n.observe(request.sampling.n)
        metrics.params_max_tokens.observe(request.sampling.max_tokens)
        self._report_times(running, duration_s)
        token = request_id_var.set(request.request_id)
        log.info(
            "%s prompt=%d cached=%d generated=%d kv=%s kv_bytes=%d ms=%d",
            running.finish_reason,
            len(request.token_ids),
            running.num_cached,
            running.num_generated,
            running.kv_source or "none",
            running.kv_bytes,
            duration_s * 1000,
        )
        request_id_var.reset(token)

    def _report_times(self, running: RunningRequest, duration_s: float) -> None:
        """Split the time of a request that answered: queue, prefill, decode."""
        if running.first_token_s is None:
            return
        metrics, to_first_s = self._metrics, running.first_token_s - running.arrived_s
        metrics.queue_time.observe(running.queued_s)
        metrics.inference_time.observe(duration_s - running.queued_s)
        metrics.prefill_time.observe(to_first_s - running.queued_s)
        decode_s = max(running.last_token_s.values()) - running.first_token_s
        metrics.decode_time.observe(decode_s)
        if (longest := running.num_generated // max(1, len(running.last_token_s))) > 1:
            metrics.time_per_token.observe(decode_s / (longest - 1))


def error_delta(request_id: str, choice: int, error: MeshError) -> ChoiceDelta:
    """The last delta of a choice that failed."""
    return ChoiceDelta(
        request_id=request_id,
        choice=choice,
        finish_reason=FAILED,
        error_code=error.code,
        error_message=error.message,
        error_param=error.param or "",
    )
