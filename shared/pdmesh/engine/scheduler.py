"""Decides what one step computes. Each sequence has tokens computed and tokens to compute; a step hands out tokens from one
budget, first to who is running, then to who waits, in order. There is no prefill phase and no decode phase.

No I/O and no tensors: messages and pull results come in as calls, what is to be said and done goes out through the outbox.
A step may be planned while the one before it still runs: its token counts are known, only its tokens are not.
"""

import logging
from collections.abc import Callable, Iterable

from pdmesh.connector.base import PullResult
from pdmesh.engine.admission import Admission
from pdmesh.engine.comebacks import Comebacks, source_of
from pdmesh.engine.damage import damage_error, readers
from pdmesh.engine.engine_state import EngineState
from pdmesh.engine.kv_manager import KVManager
from pdmesh.engine.limits import Limits
from pdmesh.engine.messages import AddRequest
from pdmesh.engine.plan import BlockUpdate, NewRow, StepResult
from pdmesh.engine.progress import Progress, end_of
from pdmesh.engine.remote_kv import Begun, RemoteKV
from pdmesh.engine.request import BrokenSequence, Request, Sequence
from pdmesh.engine.schedule import Schedule
from pdmesh.engine.states import Event, State
from pdmesh.errors import EngineFault, InternalError, MeshError
from pdmesh.protocol.messages import GroupBlocks, SamplingParams

log = logging.getLogger(__name__)

# Prompt tokens of one step whose log-probabilities are wanted: each takes logits of a whole vocabulary, 256 of them 50 to
# 150 MB in float32.
MAX_PROMPT_LOGPROBS_TOKENS = 256


class Scheduler:
    """Admission, batching, preemption and the ends of requests, over an `EngineState`."""

    def __init__(
        self, kv: KVManager, limits: Limits, check_extra: Callable[[SamplingParams], None] | None = None
    ) -> None:
        """`check_extra`: see `Admission`."""
        assert kv.fits_alone(limits.max_model_len), "a sequence that is alone must fit"
        self.state = EngineState(kv, limits)
        self._limits = limits
        self._max_active = limits.max_num_active_seqs or limits.max_num_seqs
        self._admission = Admission(self.state, check_extra)
        self.remote = RemoteKV(self.state)
        self.comebacks = Comebacks(self.state)
        self._progress = Progress(self.state, self.remote, self.comebacks)
        self._num_requests = 0
        self._num_logits_left = MAX_PROMPT_LOGPROBS_TOKENS
        self._blocked: Sequence | None = None
        self._blocked_num_free = 0

    # ---- messages -------------------------------------------------------------------------------

    def add(self, add: AddRequest) -> None:
        """Take a request in. A bad or surplus one is answered with an error for each of its choices, never raised."""
        try:
            self._admission.check(add)
        except MeshError as exc:
            self._admission.refuse(add, exc)
            return
        self._num_requests += 1
        request = Request(add, self._num_requests, len(self.state.kv.groups), rank=self._admission.rank(add))
        self.state.enqueue(request)
        for choice, tokens in zip(add.request.choices, add.request.emitted, strict=False):
            if self._progress.is_at_end(request, len(tokens)):
                # Resumed after its last token: there is nothing left but to say so.
                self._finish(request, choice, Event.IGNORED)

    def abort(self, request_id: str, choice: int = -1) -> None:
        """End one choice (-1: all) with finish reason "abort"; unknown ones have ended already."""
        request = self.state.requests.get(request_id)
        if request is None:
            return
        for each in _choices_of(request) if choice == -1 else [choice]:
            self._finish(request, each, Event.ABORTED)

    def release_offer(self, offer_id: str) -> None:
        """Let the blocks of an offer go."""
        self.remote.release_offer(offer_id)

    def end_pull(self, result: PullResult, connector: str) -> None:
        """Take in the end of a pull, or of a push's write, that the outbox ordered."""
        sequence = self.remote.end(result, connector)
        if sequence is not None:
            self._progress.note_prompt(sequence)

    def begin_grammar(self, request_id: str) -> None:
        """Let a request that waits wait for its grammar instead, which is compiled elsewhere, until `end_grammar`."""
        request = self.state.requests.get(request_id)
        if request is not None:
            self.state.begin_grammar(request.lead)

    def end_grammar(self, request_id: str, error: MeshError | None = None) -> None:
        """Let a request whose grammar is compiled go on in its place, or end it; unknown ones have ended already."""
        sequence = self.state.compiling.get(request_id)
        if sequence is None:
            return
        if error is None:
            self.state.end_grammar(sequence)
            return
        for choice in _choices_of(sequence.request):
            self._finish(sequence.request, choice, Event.FAILED, error=error)

    def reset_prefix_cache(self, damaged: Iterable[GroupBlocks] = ()) -> None:
        """Forget all cached KV. Requests that live go on, unless they hold a damaged block, and nothing of theirs is cached."""
        self.state.num_resets += 1
        requests = self.state.requests.values()
        self.state.kv.reset_prefix_cache(each for request in requests for each in request.sequences.values())
        self.remote.forget_pushed()
        for request in readers(self.state, damaged):
            self.fail_request(request.request_id, damage_error(request))

    # ---- steps ----------------------------------------------------------------------------------

    def schedule(self) -> Schedule:
        """Plan the next step and give its rows their blocks. Without rows there is nothing to do until news arrives."""
        schedule, num_bugs = Schedule(), self.state.counters.illegal_events
        self._num_logits_left = MAX_PROMPT_LOGPROBS_TOKENS
        budget, has_preempted = self._schedule_running(schedule)
        # Who was preempted must not come back at once, unless nothing else is left to do.
        if self.state.waiting and not (has_preempted and schedule.sequences):
            self._schedule_waiting(schedule, budget)
        if self.state.counters.illegal_events > num_bugs:
            schedule.drop_ended()
        if schedule.sequences or self.state.kv.has_copies:
            # Copies hold their sources until they are made: without rows they are a step too.
            plan, state = schedule.plan, self.state
            plan.freed, state.freed_rows = state.freed_rows, []
            plan.copies = state.kv.take_copies()
        if not has_preempted:
            schedule.num_free = self.state.kv.num_free
        return schedule

    def may_extend(self, schedule: Schedule) -> bool:
        """Whether `extend` could add anybody to the plan that was made last."""
        state = self.state
        # Rows and blocks that came free meanwhile may still be in the plan, and two of its rows must not write to one block.
        is_intact = not state.freed_rows and state.kv.num_free == schedule.num_free
        return bool(state.waiting) and bool(schedule.sequences) and is_intact

    def extend(self, schedule: Schedule) -> None:
        """Add who waits, as far as there is room, to the plan that was made last, if `may_extend` and no worker has seen it."""
        num_bugs = self.state.counters.illegal_events
        self._schedule_waiting(schedule, self._limits.max_num_batched_tokens - schedule.num_tokens)
        if self.state.counters.illegal_events > num_bugs:
            schedule.drop_ended()
        schedule.plan.copies += self.state.kv.take_copies()
        schedule.num_free = self.state.kv.num_free

    def update(self, schedule: Schedule, result: StepResult) -> None:
        """Take in what a step produced. Steps are updated in the order in which they were planned."""
        plan, advance = schedule.plan, self._progress.advance
        schedule.end()
        for index, sequence in enumerate(schedule.sequences):
            try:
                advance(sequence, index, plan, result)
            except BrokenSequence as exc:
                self.expel(exc)

    def fail(self, schedule: Schedule, message: str) -> None:
        """End all requests of a step that could not be run, or whose result could not be taken in."""
        schedule.end()
        if schedule.plan.copies:
            # Blocks were to be copied for sequences that still wait: whether they were, nobody knows.
            for sequence in self.state.waiting.holders():
                if not sequence.is_finished:
                    self.state.preempt(sequence)
        for request in {each.request.number: each.request for each in schedule.sequences}.values():
            self.fail_request(request.request_id, EngineFault(message))

    def fail_add(self, add: AddRequest, message: str) -> None:
        """Answer a request that could not be taken in, wholly or in part."""
        if add.request.request_id in self.state.requests:
            self.fail_request(add.request.request_id, InternalError(message))
        else:
            self._admission.refuse(add, InternalError(message))

    def fail_request(self, request_id: str, error: MeshError) -> None:
        """End all choices of a request; nobody else finds its KV."""
        request = self.state.requests.get(request_id)
        if request is None:
            return
        for sequence in request.sequences.values():
            self.state.kv.forget(sequence)
        self.remote.pushing.spoil(request.offer_id)
        try:
            for choice in _choices_of(request):
                self._finish(request, choice, Event.FAILED, error=error)
        except BrokenSequence as exc:
            self.expel(exc)

    def expel(self, broken: BrokenSequence) -> None:
        """End the request of a sequence that met a bug of ours; the others go on."""
        request = broken.sequence.request
        log.error("request %s met a bug of the engine", request.request_id, exc_info=broken)
        self.state.counters.illegal_events += 1
        self.remote.pushing.spoil(request.offer_id)
        self.state.expel(request, EngineFault(f"the engine met a bug: {broken}"))

    def _schedule_running(self, schedule: Schedule) -> tuple[int, bool]:
        """Give running sequences their tokens, in order; return the budget left and whether any was preempted."""
        state, budget, num_before = self.state, self._limits.max_num_batched_tokens, self.state.counters.num_preemptions
        cap = self._chunk_cap()
        # Preemption only takes from behind: what is scheduled already stays.
        for place, sequence in enumerate(state.running):
            if budget <= 0:
                break
            start = sequence.num_planned
            if sequence.num_wanted - start == 1 and start < sequence.capacity and start + 1 < sequence.end:
                # One more token of a sequence that has room for it: nearly all rows of nearly all steps.
                count = 1
            else:
                # A long prompt leaves a token for each of those behind it, so that none of them stands still.
                num_behind = min(len(state.running) + state.waiting.num_holding, self._max_active) - place - 1
                count = self._share(
                    sequence,
                    sequence.num_wanted - start,
                    min(max(budget - num_behind, 1), self.comebacks.cap(sequence, start, cap)),
                )
                if count == 0 or not self._make_room(schedule, sequence, start + count):
                    continue
            schedule.add(sequence, start, count)
            budget -= count
        return budget, state.counters.num_preemptions > num_before

    def _schedule_waiting(self, schedule: Schedule, budget: int) -> None:
        state, cap = self.state, self._chunk_cap()
        # No more fetch KV than could run: what is fetched holds blocks, and who runs must not lose its own to it.
        num_fetching = state.ledger.num_owners + state.waiting.num_holding
        while state.waiting:
            sequence = state.waiting.first()
            num_active = len(state.running) + (num_fetching if source_of(sequence) is not None else 0)
            if num_active >= self._max_active or sequence.num_in_flight or self._is_still_blocked(sequence):
                return
            if budget == 0 and source_of(sequence) is None:
                return
            try:
                count, may_go_on = self._admit(schedule, sequence, min(budget, cap))
                num_fetching += sequence.state is State.WAITING_FOR_REMOTE_KVS
            except BrokenSequence as exc:
                self.expel(exc)
                continue
            budget -= count
            if not may_go_on:
                return

    def _admit(self, schedule: Schedule, sequence: Sequence, budget: int) -> tuple[int, bool]:
        """Try to start the first waiting sequence; return the tokens it got, and whether to go on with who is first then."""
        state, is_alone = self.state, not self.state.running
        reserve = 0 if is_alone else self._limits.watermark_blocks
        hit = None
        if not sequence.holds_blocks:
            hit = state.kv.lookup(sequence)
            if source_of(sequence) is not None:
                # Fetched KV cannot be taken back before it is here: it leaves a block for each that runs.
                num_rows_blocks = len(state.running) * len(state.kv.groups)
                begun = self.remote.begin(sequence, hit, reserve=reserve + num_rows_blocks)
                if begun in (Begun.PULLING, Begun.FAILED):
                    return 0, True
                if begun is Begun.NO_ROOM:
                    return 0, self._block(sequence, is_alone)
            if self.comebacks.wants_source(sequence, hit) and state.kv.has_room_for_all(sequence, hit, reserve):
                self.comebacks.ask(sequence, hit)
                return 0, True
        start = hit.num_tokens if hit is not None else sequence.num_computed
        most = self.comebacks.cap(sequence, start, budget)
        count = self._share(sequence, sequence.num_tokens - start, most)
        if count == 0 or self._has_too_many_partial(sequence, start + count):
            return 0, False
        # Also when it is alone: what it needs may be held by offers and pulls, and it would start and give up for ever.
        if not state.kv.has_room_for_all(sequence, hit, reserve):
            return 0, self._block(sequence, is_alone)
        if not state.kv.allocate(sequence, start + count, hit=hit, start=start, reserve=reserve):
            return 0, self._block(sequence, is_alone)
        state.run(sequence)
        if hit is not None:
            self.remote.note_hits(sequence, start)
        self.comebacks.note_return(sequence, start)
        request = sequence.request
        sequence.end = sequence.num_tokens + 1 if request.prefill_only else end_of(request, self._limits.max_model_len)
        schedule.plan.new.append(self._new_row(sequence))
        schedule.add(sequence, start, count)
        self._progress.note_start(sequence)
        return count, True

    def _new_row(self, sequence: Sequence) -> NewRow:
        request = sequence.request
        return NewRow(
            row=sequence.row,
            choice=sequence.choice,
            token_ids=sequence.tokens.view(0, sequence.num_tokens).astype("<u4").tobytes(),
            num_prompt=request.num_prompt,
            sampling=request.sampling,
            wants_prompt_logprobs=sequence.wants_prompt_logprobs,
            blocks=[list(table) for table in sequence.blocks],
        )

    def _chunk_cap(self) -> int:
        """Return the most tokens that one sequence may get in this step; a single request is not held back for nobody."""
        limits, num_others = self._limits, len(self.state.running) + len(self.state.waiting) - 1
        if not limits.long_prefill_token_threshold or num_others <= 0:
            return limits.max_num_batched_tokens
        if limits.is_threshold_adaptive:
            return max(limits.long_prefill_token_threshold, limits.max_num_batched_tokens // (num_others + 1))
        return limits.long_prefill_token_threshold

    def _share(self, sequence: Sequence, num_to_compute: int, most: int) -> int:
        """Return how many tokens a sequence gets; none when a step under way is going to end it."""
        if sequence.num_wanted > sequence.num_tokens and sequence.num_wanted >= sequence.end:
            return 0
        if not sequence.wants_prompt_logprobs or sequence.num_planned >= sequence.request.num_prompt:
            return min(num_to_compute, most)
        count = min(num_to_compute, most, self._num_logits_left)
        self._num_logits_left -= count
        return count

    def _has_too_many_partial(self, sequence: Sequence, num_planned: int) -> bool:
        """Whether starting a sequence leaves more prompts half computed than may be."""
        most = self._limits.max_num_partial_prefills
        if not most or num_planned >= sequence.num_tokens:
            return False
        return sum(each.num_planned < each.num_tokens for each in self.state.running) >= most

    def _make_room(self, schedule: Schedule, sequence: Sequence, num_tokens: int) -> bool:
        """Allocate for a running sequence, taking blocks from who comes last; False when it is not running any more."""
        state, have = self.state, len(sequence.blocks[0])
        while not state.kv.allocate(sequence, num_tokens, start=sequence.num_planned):
            if self.remote.landings.give_way():
                continue
            victim = state.last_holder()
            assert victim is not None
            try:
                self._preempt(victim)
            except BrokenSequence as exc:
                self.expel(exc)
            if victim is sequence or sequence.is_finished:
                return False
        for group, table in enumerate(sequence.blocks):
            if len(table) > have:
                schedule.plan.updates.append(BlockUpdate(sequence.row, group, have, table[have:]))
        return True

    def _preempt(self, victim: Sequence) -> None:
        """Take a sequence's blocks away; the tier may pull what is not overwritten at once."""
        self.comebacks.spill(victim, at_least=1)
        self.state.preempt(victim)

    def _block(self, sequence: Sequence, is_alone: bool) -> bool:
        """Note that the first in line has no room. True when it is worth trying again at once."""
        if self.remote.landings.give_way():
            return True
        victim = self.state.last_holder()
        if is_alone and victim is not None and victim is not sequence:
            # Nothing runs that could free blocks, and what those behind it hold stands in the way.
            self._preempt(victim)
            return True
        self._blocked, self._blocked_num_free = sequence, self.state.kv.num_free
        return False

    def _is_still_blocked(self, sequence: Sequence) -> bool:
        """Whether trying again would repeat a failed attempt: looking up a long prompt at every step is not free.

        That its hit may have grown meanwhile does not count: it waits until a block comes free, which any end brings about.
        """
        return (
            self._blocked is sequence and bool(self.state.running) and self.state.kv.num_free <= self._blocked_num_free
        )

    def _finish(self, request: Request, choice: int, event: Event, *, error: MeshError | None = None) -> None:
        sequence = self.state.take_sequence(request, choice)
        if sequence is not None:
            self.state.finish(sequence, event, error=error)


def _choices_of(request: Request) -> list[int]:
    """Return the live choices, the lead last: no other has to take its place when all end."""
    others = [choice for choice in request.sequences if choice != request.lead.choice]
    return [*request.held, *others, request.lead.choice]
