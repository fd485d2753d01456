"""Everything the scheduler knows, and the moves that keep it whole: enqueue, run, preempt, finish.

A sequence is in exactly one of: the waiting queue, the running list, the ledger (pulling), those whose grammar is compiled,
or finished; a choice that has not started is a number in its request's `held`. Each move below changes state, place, row and
blocks together. What is freed may be used at once, though steps under way still write to it: steps run in order, and a pull
into it starts only when they have ended (see `core`).
"""

import bisect
import time
from collections import deque
from collections.abc import Callable

from pdmesh.connector.ledger import BlockLists, Ledger
from pdmesh.engine.counters import Counters
from pdmesh.engine.integrity import check_state
from pdmesh.engine.kv_manager import KVManager
from pdmesh.engine.limits import Limits
from pdmesh.engine.messages import TransferEnded
from pdmesh.engine.outbox import Outbox
from pdmesh.engine.request import NO_ROW, BrokenSequence, Comeback, Order, Request, Sequence
from pdmesh.engine.states import FINISH_REASON, Event, State
from pdmesh.engine.stats import Stats
from pdmesh.engine.waiting_queue import WaitingQueue
from pdmesh.errors import MeshError
from pdmesh.protocol.messages import ChoiceDelta, KVSource, TokenLogprobs

PREFIX_SOURCE = "prefix"
"""`kv_source` of a sequence that found KV of its beginning in this engine."""


class EngineState:
    """Requests, queues, blocks and the outbox of one engine core."""

    def __init__(self, kv: KVManager, limits: Limits) -> None:
        self.kv = kv
        self.limits = limits
        self._stream_interval = limits.stream_interval
        self.requests: dict[str, Request] = {}
        self.num_held = 0
        """Choices of all requests that have not started."""
        self.num_uncomputed_tokens = 0
        """Prompt tokens of all requests whose prompt is not computed."""
        self.num_resets = 0
        """Times that the prefix cache was emptied."""
        self.waiting = WaitingQueue()
        self.compiling: dict[str, Sequence] = {}
        """Those that wait for a grammar, by request id."""
        self.asking: dict[tuple[str, int], Sequence] = {}
        """Those that were preempted and wait for the server to find their KV, by request id and choice."""
        self.running: list[Sequence] = []
        """In order."""
        self.ledger: Ledger[Sequence] = Ledger()
        self.outbox = Outbox()
        self.counters = Counters()
        self.freed_rows: list[int] = []
        """Rows that the worker has not been told of yet."""
        self.borrowers: list[Callable[[], list[BlockLists]]] = []
        """Who else may hold blocks; each returns what it holds."""
        self._has_strays = False
        self._rows = deque(range(limits.max_num_seqs))
        """Free ones."""

    def take_strays(self) -> bool:
        """Whether, since the last call, blocks were freed that a step under way may still write to."""
        strays, self._has_strays = self._has_strays, False
        return strays

    def take_outbox(self) -> Outbox:
        taken, self.outbox = self.outbox, Outbox()
        return taken

    @property
    def num_queued(self) -> int:
        """Requests whose first choice has not had a turn yet, and choices that have not started."""
        return self.waiting.num_new + self.num_held + len(self.compiling)

    def enqueue(self, request: Request) -> None:
        """Take in a new request; its first choice waits."""
        self.requests[request.request_id] = request
        self.num_held += len(request.held)
        self.num_uncomputed_tokens += request.num_prompt
        self.waiting.push(request.lead, is_new=True)

    def note_prompt_computed(self, request: Request) -> None:
        """Count a request's prompt as done, once."""
        if not request.is_prompt_computed:
            request.is_prompt_computed = True
            self.num_uncomputed_tokens -= request.num_prompt

    def begin_grammar(self, sequence: Sequence) -> None:
        """Take a sequence out of the line until its grammar is compiled."""
        sequence.apply(Event.GRAMMAR_STARTED)
        self.waiting.remove(sequence)
        self.compiling[sequence.request.request_id] = sequence

    def end_grammar(self, sequence: Sequence) -> None:
        """Let a sequence whose grammar is compiled back into the line, to its place."""
        sequence.apply(Event.GRAMMAR_READY)
        del self.compiling[sequence.request.request_id]
        self.waiting.push(sequence, is_new=True)

    def take_sequence(self, request: Request, choice: int) -> Sequence | None:
        """Return a live choice's sequence, made now for one that has not started; it must be moved on at once."""
        if choice in request.held:
            self.num_held -= 1
            return request.make_next(choice)
        return request.sequences.get(choice)

    def run(self, sequence: Sequence) -> None:
        """Move a sequence from the waiting queue into the batch."""
        sequence.apply(Event.ADMITTED)
        self.waiting.remove(sequence)
        sequence.request.started_s = sequence.request.started_s or time.monotonic()
        sequence.row = self._rows.popleft()
        bisect.insort(self.running, sequence, key=_order)

    def preempt(self, sequence: Sequence) -> None:
        """Take a sequence's blocks away; it waits in its place, before all that come after it, to compute them again."""
        before = sequence.state
        self._note_stray(sequence)
        sequence.apply(Event.PREEMPTED)
        if before is State.RUNNING:
            self._stop_running(sequence)
        else:
            self.waiting.remove(sequence)
        if sequence.has_reported or sequence.unsent_token_ids:
            for blocks in self.kv.describe(sequence.blocks):
                sequence.lost_blocks.update(zip(blocks.block_ids, blocks.generations, strict=True))
        self.kv.release(sequence)
        self.waiting.push(sequence)
        self.counters.num_preemptions += 1
        self._end_comeback(sequence)
        sequence.comeback, sequence.num_told_blocks = Comeback(), 0

    def last_holder(self) -> Sequence | None:
        """Return the sequence that comes last of those whose blocks may be taken away."""
        waiting, running = self.waiting.last_holder(), self.running[-1] if self.running else None
        if waiting is None or running is None:
            return waiting or running
        return max(waiting, running, key=_order)

    def free_next(self, request: Request, donor: Sequence | None) -> None:
        """Let the next choice compete for the batch, on what `donor`, who leads, has computed of the prompt; it leads now."""
        if not request.held:
            return
        self.num_held -= 1
        request.lead = sequence = request.make_next()
        sequence.apply(Event.FREED)
        if donor is not None and self.kv.share(donor, sequence, reserve=self.limits.watermark_blocks):
            self.note_hits(sequence, sequence.num_computed)
        self.waiting.push(sequence)

    def note_hits(self, sequence: Sequence, num_tokens: int) -> None:
        """Let a sequence begin behind the first `num_tokens`, whose KV was here and is now its own too."""
        sequence.num_computed = sequence.num_planned = num_tokens
        if sequence.has_reported:
            return
        sequence.num_reused_tokens = num_tokens
        if not sequence.request.is_lookup_counted:
            sequence.request.is_lookup_counted = True
            self.counters.prefix_cache_queries += sequence.num_tokens
            self.counters.prefix_cache_hits += num_tokens
        if sequence.kv_source in ("", PREFIX_SOURCE):
            sequence.kv_source = PREFIX_SOURCE if num_tokens else ""

    def finish(
        self,
        sequence: Sequence,
        event: Event,
        *,
        token_ids: list[int] | None = None,
        logprobs: list[TokenLogprobs] | None = None,
        stop_token_id: int | None = None,
        error: MeshError | None = None,
    ) -> None:
        """End a sequence, wherever it is, free what it holds, and say so in its last delta."""
        request, before = sequence.request, sequence.state
        sequence.apply(event)
        is_last = sequence is request.lead and not request.held
        if sequence is request.lead and not is_last:
            # Without a lead the held would wait for ever. KV that led to a failure is not handed on.
            self.free_next(request, None if event is Event.FAILED else sequence)
            if before is State.WAITING_FOR_REMOTE_KVS:
                # The source went with the pull.
                request.lead.kv_source = "recompute:aborted"
        self._leave(sequence, before)
        self.report(
            sequence,
            token_ids=token_ids or [],
            logprobs=logprobs or [],
            finish_reason=FINISH_REASON[sequence.state],
            stop_token_id=stop_token_id,
            error=error,
        )
        if is_last and request.source is not None:
            self.end_source(request, request.source, reason="aborted")
        self._end_comeback(sequence)
        del request.sequences[sequence.choice]
        if request.is_ended:
            self.note_prompt_computed(request)
            del self.requests[request.request_id]

    def expel(self, request: Request, error: MeshError) -> None:
        """End a request whose states cannot be trusted: its sequences are looked for in every place there is."""
        for sequence in list(request.sequences.values()):
            self._note_stray(sequence)
            if sequence.row != NO_ROW:
                self._free_row(sequence)
            self.running[:] = [each for each in self.running if each is not sequence]
            self.waiting.discard(sequence)
            if self.compiling.get(request.request_id) is sequence:
                del self.compiling[request.request_id]
            self.asking.pop((request.request_id, sequence.choice), None)
            self._end_comeback(sequence)
            load = self.ledger.find_load(sequence)
            if load is not None:
                load.quarantine(self.kv.detach(sequence))
                self.outbox.cancels.append(load.source.transfer_id)
            self.kv.forget(sequence)
            self.kv.release(sequence)
            sequence.state = State.FINISHED_ERROR
            self.report(sequence, token_ids=[], logprobs=[], finish_reason="error", error=error)
        self.num_held -= len(request.held)
        for choice in list(request.held):
            held = request.make_next(choice)
            self.report(held, token_ids=[], logprobs=[], finish_reason="error", error=error)
        request.sequences.clear()
        if request.source is not None:
            self.end_source(request, request.source, reason="aborted")
        if self.requests.pop(request.request_id, None) is not None:
            self.note_prompt_computed(request)

    def report(
        self,
        sequence: Sequence,
        *,
        token_ids: list[int],
        logprobs: list[TokenLogprobs],
        finish_reason: str = "",
        stop_token_id: int | None = None,
        error: MeshError | None = None,
    ) -> None:
        """Put a delta into the outbox, at the latest when `stream_interval` tokens are unsent, the first and the last at once.

        A sequence's first one also tells where its KV came from.
        """
        if sequence.unsent_token_ids:
            token_ids, logprobs = sequence.unsent_token_ids + token_ids, sequence.unsent_logprobs + logprobs
        if sequence.has_reported and not finish_reason and error is None and len(token_ids) < self._stream_interval:
            sequence.unsent_token_ids, sequence.unsent_logprobs = token_ids, logprobs
            return
        sequence.unsent_token_ids, sequence.unsent_logprobs = [], []
        news, sequence.news = sequence.news, ""
        request = sequence.request
        if sequence.has_reported and not finish_reason:
            self.outbox.deltas.append(
                ChoiceDelta(
                    request_id=request.request_id,
                    choice=sequence.choice,
                    token_ids=token_ids,
                    logprobs=logprobs,
                    kv_source=news,
                )
            )
            return
        is_first, sequence.has_reported = not sequence.has_reported, True
        has_all = sequence.wants_prompt_logprobs and len(sequence.prompt_logprobs) == request.num_prompt
        self.outbox.deltas.append(
            ChoiceDelta(
                request_id=request.request_id,
                choice=sequence.choice,
                token_ids=token_ids,
                logprobs=logprobs,
                prompt_logprobs=sequence.prompt_logprobs if is_first and has_all else None,
                finish_reason=finish_reason,
                stop_token_id=stop_token_id,
                cached_tokens=min(sequence.num_reused_tokens, request.num_prompt) if is_first else 0,
                kv_bytes=sequence.kv_bytes if is_first else 0,
                kv_source=news or (sequence.kv_source if is_first else ""),
                queued_s=request.queued_s if is_first else 0.0,
                error_code="" if error is None else error.code,
                error_message="" if error is None else error.message,
                error_param="" if error is None else error.param or "",
            )
        )

    def end_source(self, request: Request, source: KVSource, *, reason: str) -> None:
        """Tell the server that a source is not needed any more, without a pull.

        An empty reason is success: the source has served its purpose, since everything is here.
        """
        request.source = None
        self.report_source(request.request_id, source, reason=reason)

    def report_source(self, request_id: str, source: KVSource, *, reason: str) -> None:
        """Tell the server how a source ended that was never pulled."""
        self.outbox.transfers.append(
            TransferEnded(
                transfer_id=source.transfer_id,
                peer_id=source.peer_id,
                request_id=request_id,
                committed=not reason,
                reason=reason,
            )
        )

    def _end_comeback(self, sequence: Sequence) -> None:
        """Let the source go that a sequence was to come back by."""
        comeback, sequence.comeback = sequence.comeback, None
        if comeback is not None and comeback.source is not None:
            self.report_source(sequence.request.request_id, comeback.source, reason="aborted")

    def stats(self) -> Stats:
        """Return gauges and counters; the core adds what it knows of steps."""
        return Stats(
            num_running=len(self.running),
            num_waiting=len(self.waiting) + self.num_held + len(self.compiling) + len(self.asking),
            num_waiting_tokens=self.waiting.num_tokens,
            num_waiting_remote=self.ledger.num_loads,
            num_blocks_used=self.kv.num_used,
            num_blocks=self.kv.num_blocks,
            num_offers_held=self.ledger.num_offers,
            **vars(self.counters),
        )

    def check_integrity(self) -> None:
        """Assert that every block and every sequence is in exactly one place."""
        check_state(self, sorted(self._rows))

    def _leave(self, sequence: Sequence, state: State) -> None:
        """Take a sequence out of the place that `state` means; its blocks go back, or into quarantine while a pull may write."""
        self._note_stray(sequence)
        match state:
            case State.RUNNING:
                self._stop_running(sequence)
            case State.WAITING | State.PREEMPTED:
                self.waiting.remove(sequence)
            case State.WAITING_FOR_GRAMMAR:
                if self.compiling.pop(sequence.request.request_id, None) is not sequence:
                    raise BrokenSequence(sequence, f"{sequence} waits for no grammar")
            case State.WAITING_FOR_SOURCE:
                if self.asking.pop((sequence.request.request_id, sequence.choice), None) is not sequence:
                    raise BrokenSequence(sequence, f"{sequence} waits for no source")
            case State.WAITING_FOR_REMOTE_KVS:
                load = self.ledger.find_load(sequence)
                if load is None:
                    raise BrokenSequence(sequence, f"{sequence} waits for no pull")
                load.quarantine(self.kv.detach(sequence))
                self.outbox.cancels.append(load.source.transfer_id)
        self.kv.release(sequence)

    def _note_stray(self, sequence: Sequence) -> None:
        self._has_strays = self._has_strays or sequence.num_in_flight > 0

    def _stop_running(self, sequence: Sequence) -> None:
        index = bisect.bisect_left(self.running, sequence.order, key=_order)
        if index == len(self.running) or self.running[index] is not sequence:
            raise BrokenSequence(sequence, f"{sequence} does not run")
        del self.running[index]
        self._free_row(sequence)

    def _free_row(self, sequence: Sequence) -> None:
        self._rows.append(sequence.row)
        self.freed_rows.append(sequence.row)
        sequence.row = NO_ROW


def _order(sequence: Sequence) -> Order:
    return sequence.order
