"""Decides what one step computes. Each sequence has tokens computed and tokens to compute; a step hands out tokens from one
budget, first to who is running, then to who waits, in order of arrival.

No I/O and no tensors: messages and pull results come in as calls, what is to be said and done goes out through the outbox.
"""

from dataclasses import dataclass, field

from pdmesh.connector.base import PullResult
from pdmesh.engine.admission import Limits, check_request
from pdmesh.engine.engine_state import EngineState
from pdmesh.engine.kv_manager import KVManager
from pdmesh.engine.messages import AddRequest, TransferEnded
from pdmesh.engine.progress import Progress, RowResult
from pdmesh.engine.remote_kv import Begun, RemoteKV
from pdmesh.engine.request import Request, Sequence
from pdmesh.engine.states import Event
from pdmesh.errors import RETRY_AFTER_S, InternalError, InvalidRequest, MeshError, Overloaded
from pdmesh.protocol.messages import ChoiceDelta

# Logits of a whole vocabulary per position: 256 of them are 50 to 150 MB in float32.
MAX_PROMPT_LOGPROBS_CHUNK_TOKENS = 256


@dataclass(frozen=True, slots=True)
class ScheduledRow:
    """One sequence's share of a step: the next `num_tokens` after those computed."""

    sequence: Sequence
    num_tokens: int

    @property
    def end(self) -> int:
        """Tokens computed after the step."""
        return self.sequence.num_computed + self.num_tokens

    @property
    def needs_token(self) -> bool:
        """Whether the step reaches the sequence's last token, so that the next one is to be sampled."""
        return self.end == self.sequence.num_tokens and self.sequence.request.sampling.max_tokens > 0


@dataclass(frozen=True, slots=True)
class Schedule:
    """What one step computes."""

    rows: list[ScheduledRow] = field(default_factory=list)

    @property
    def num_tokens(self) -> int:
        return sum(row.num_tokens for row in self.rows)


class Scheduler:
    """Admission, batching, preemption and the ends of requests, over an `EngineState`."""

    def __init__(self, kv: KVManager, limits: Limits) -> None:
        assert limits.max_model_len <= kv.max_tokens, "a sequence that is alone must fit"
        self.state = EngineState(kv, limits)
        self._limits = limits
        self._remote = RemoteKV(self.state)
        self._progress = Progress(self.state, self._remote)
        self._num_requests = 0
        self._blocked: Sequence | None = None
        self._blocked_num_free = 0

    # ---- messages -------------------------------------------------------------------------------

    def add(self, add: AddRequest) -> None:
        """Take a request in. A bad or surplus one is answered with an error for each of its choices, never raised."""
        try:
            self._check(add)
        except MeshError as exc:
            self._refuse(add, exc)
            return
        self._num_requests += 1
        request = Request(add, self._num_requests, len(self.state.kv.groups))
        self.state.enqueue(request)
        for choice, tokens in zip(add.request.choices, add.request.emitted, strict=False):
            if self._progress.is_at_end(request, len(tokens)):
                # Resumed after its last token: there is nothing left but to say so.
                self._finish(request, choice, Event.LENGTH_REACHED)

    def abort(self, request_id: str, choice: int = -1) -> None:
        """End one choice (-1: all) with finish reason "abort"; unknown ones have ended already."""
        request = self.state.requests.get(request_id)
        if request is None:
            return
        for each in _choices_of(request) if choice == -1 else [choice]:
            self._finish(request, each, Event.ABORTED)

    def release_offer(self, offer_id: str) -> None:
        """Let the blocks of an offer go."""
        self._remote.release_offer(offer_id)

    def end_pull(self, result: PullResult, connector: str) -> None:
        """Take in the end of a pull that the outbox ordered."""
        sequence = self._remote.end(result, connector)
        if sequence is not None:
            self._progress.note_prompt(sequence)

    # ---- steps ----------------------------------------------------------------------------------

    def schedule(self) -> Schedule:
        """Choose the next step's rows and give them their blocks. An empty schedule means: wait for news."""
        rows: list[ScheduledRow] = []
        budget, has_preempted = self._schedule_running(rows)
        if not has_preempted:
            self._schedule_waiting(rows, budget)
        return Schedule(rows)

    def update(self, schedule: Schedule, results: list[RowResult]) -> None:
        """Take in what a step produced, one result per row."""
        for row, result in zip(schedule.rows, results, strict=True):
            self._progress.advance(row.sequence, row.num_tokens, result)

    def fail(self, schedule: Schedule, message: str) -> None:
        """End all requests of a step that could not be run."""
        for request in {row.sequence.request.number: row.sequence.request for row in schedule.rows}.values():
            self.fail_request(request.request_id, message)

    def fail_add(self, add: AddRequest, message: str) -> None:
        """Answer a request that could not be taken in, wholly or in part."""
        if add.request.request_id in self.state.requests:
            self.fail_request(add.request.request_id, message)
        else:
            self._refuse(add, InternalError(message))

    def fail_request(self, request_id: str, message: str) -> None:
        """End all choices of a request with an InternalError."""
        request = self.state.requests.get(request_id)
        if request is None:
            return
        for sequence in request.sequences.values():
            self.state.kv.forget(sequence)
        for choice in _choices_of(request):
            self._finish(request, choice, Event.FAILED, error=InternalError(message))

    def _schedule_running(self, rows: list[ScheduledRow]) -> tuple[int, bool]:
        """Give running sequences their tokens, oldest first; return the budget left and whether any was preempted."""
        state, budget, num_before = self.state, self._limits.max_num_batched_tokens, self.state.counters.num_preemptions
        while len(rows) < len(state.running) and budget > 0:
            # Rows are those scheduled so far, and preemption only takes from behind them.
            sequence = state.running[len(rows)]
            num_tokens = self._share(sequence, sequence.num_to_compute, budget)
            if self._make_room(sequence, sequence.num_computed + num_tokens):
                rows.append(ScheduledRow(sequence, num_tokens))
                budget -= num_tokens
        return budget, state.counters.num_preemptions > num_before

    def _schedule_waiting(self, rows: list[ScheduledRow], budget: int) -> None:
        state = self.state
        while state.waiting and len(state.running) < self._limits.max_num_seqs:
            sequence = state.waiting.first()
            if self._is_still_blocked(sequence) or (budget == 0 and sequence.request.source is None):
                return
            row, has_left = self._admit(sequence, budget, is_alone=not state.running)
            if row is not None:
                rows.append(row)
                budget -= row.num_tokens
            elif not has_left:
                return

    def _admit(self, sequence: Sequence, budget: int, *, is_alone: bool) -> tuple[ScheduledRow | None, bool]:
        """Try to start the first waiting sequence; return its row, or whether it has left the queue without one."""
        state = self.state
        reserve = 0 if is_alone else self._limits.watermark_blocks
        cached = None
        if not sequence.holds_blocks:
            cached = state.kv.lookup(sequence)
            if sequence.request.source is not None and sequence is sequence.request.lead:
                begun = self._remote.begin(sequence, cached, reserve=reserve)
                if begun in (Begun.PULLING, Begun.FAILED):
                    return None, True
                if begun is Begun.NO_ROOM:
                    return None, self._block(sequence, is_alone)
        if budget == 0:
            return None, False
        start = len(cached[0]) * state.kv.block_size if cached is not None else sequence.num_computed
        num_tokens = self._share(sequence, sequence.num_tokens - start, budget)
        if not state.kv.allocate(sequence, start + num_tokens, cached=cached, reserve=reserve):
            return None, self._block(sequence, is_alone)
        state.run(sequence)
        if cached is not None:
            state.note_hits(sequence, start)
        self._progress.note_start(sequence)
        return ScheduledRow(sequence, num_tokens), True

    def _share(self, sequence: Sequence, num_to_compute: int, budget: int) -> int:
        """Return how many tokens a sequence gets out of `budget`."""
        share = min(num_to_compute, budget)
        if self._limits.long_prefill_token_threshold:
            share = min(share, self._limits.long_prefill_token_threshold)
        if sequence.wants_prompt_logprobs:
            share = min(share, MAX_PROMPT_LOGPROBS_CHUNK_TOKENS)
        return share

    def _make_room(self, sequence: Sequence, num_tokens: int) -> bool:
        """Allocate for a running sequence, taking blocks from who arrived last; False when that was itself."""
        while not self.state.kv.allocate(sequence, num_tokens):
            victim = self.state.last_holder()
            assert victim is not None
            self.state.preempt(victim)
            if victim is sequence:
                return False
        return True

    def _block(self, sequence: Sequence, is_alone: bool) -> bool:
        """Note that the first in line has no room. True when it is worth trying again at once."""
        victim = self.state.last_holder()
        if is_alone and victim is not None and victim.order > sequence.order:
            # Nothing runs that could free blocks, and fetched KV of later arrivals stands in the way.
            self.state.preempt(victim)
            return True
        self._blocked, self._blocked_num_free = sequence, self.state.kv.num_free
        return False

    def _is_still_blocked(self, sequence: Sequence) -> bool:
        """Whether trying again would repeat a failed attempt: looking up a long prompt at every step is not free."""
        return (
            self._blocked is sequence and bool(self.state.running) and self.state.kv.num_free <= self._blocked_num_free
        )

    def _finish(self, request: Request, choice: int, event: Event, *, error: MeshError | None = None) -> None:
        sequence = self.state.sequence_of(request, choice)
        if sequence is not None:
            self.state.finish(sequence, event, error=error)

    # ---- admission ------------------------------------------------------------------------------

    def _check(self, add: AddRequest) -> None:
        request_id = add.request.request_id
        if request_id in self.state.requests:
            raise InvalidRequest(f"request id {request_id!r} is in use", param="request_id")
        check_request(add, self._limits)
        num_queued, most = self.state.num_queued, self._limits.max_num_queued_reqs
        if num_queued + len(add.request.choices) > most:
            raise Overloaded(
                f"{num_queued} requests and choices are waiting already, at most {most} may (max-num-queued-reqs)",
                retry_after_s=RETRY_AFTER_S,
            )

    def _refuse(self, add: AddRequest, error: MeshError) -> None:
        outbox = self.state.outbox
        for choice in add.request.choices:
            outbox.deltas.append(
                ChoiceDelta(
                    request_id=add.request.request_id,
                    choice=choice,
                    finish_reason="error",
                    error_code=error.code,
                    error_message=error.message,
                    error_param=error.param or "",
                )
            )
        if add.source is not None:
            outbox.transfers.append(
                TransferEnded(
                    transfer_id=add.source.transfer_id,
                    peer_id=add.source.peer_id,
                    request_id=add.request.request_id,
                    committed=False,
                    reason="refused",
                )
            )


def _choices_of(request: Request) -> list[int]:
    """Return the live choices, the lead last: no other has to take its place when all end."""
    others = [choice for choice in request.sequences if choice != request.lead.choice]
    return [*request.held, *others, request.lead.choice]
