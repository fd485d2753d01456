"""Who may go before whom, and how many steps a request waits at most: what `docs/scheduler.md` proves, checked at every plan."""

from dataclasses import dataclass, field

from pdmesh.engine.engine_state import EngineState
from pdmesh.engine.limits import Limits
from pdmesh.engine.request import Request, Sequence
from pdmesh.engine.schedule import Schedule
from pdmesh.engine.scheduler import MAX_PROMPT_LOGPROBS_TOKENS
from pdmesh.engine.states import State

Choice = tuple[int, int]
"""Request number and choice."""


@dataclass(frozen=True)
class Before:
    """Where everybody stood before a plan."""

    running: list[Sequence]
    waiting: list[Sequence]
    """Those without KV."""
    holders: list[Sequence]
    """All that hold blocks."""
    is_held_outside: bool
    """Whether offers or pulls hold blocks, which nobody can take away."""


@dataclass
class Waiting:
    """A request that has not had its first row."""

    request: Request
    ahead: dict[Choice, int]
    """Steps that each choice before it needs when it is alone."""
    num_lost: int
    num_steps: int = 0


@dataclass
class WaitingBound:
    limits: Limits
    lag: int
    """Steps planned before the result of the last one is known."""
    waiting: dict[int, Waiting] = field(default_factory=dict)
    num_lost: int = 0
    """Steps that a first row got and lost again, to preemption."""
    _led: dict[Choice, int] = field(default_factory=dict)
    """Steps that a choice has had the first row of, since it last began."""

    def note_arrival(self, state: EngineState, request: Request) -> None:
        order = request.lead.order
        for each in self.waiting.values():
            if order < each.request.lead.order:
                each.ahead |= self._needs(request)
        if request.source is not None or request.lead.state is not State.WAITING:
            return
        ahead: dict[Choice, int] = {}
        for other in state.requests.values():
            if other is not request and (other.lead.order < order or any(map(_has_begun, other.sequences.values()))):
                ahead |= self._needs(other)
        self.waiting[request.number] = Waiting(request, ahead, self.num_lost)

    def note_preemption(self, sequence: Sequence) -> None:
        self.num_lost += self._led.pop(_choice(sequence), 0)

    def look(self, state: EngineState) -> Before:
        sequences = [each for request in state.requests.values() for each in request.sequences.values()]
        return Before(
            running=list(state.running),
            waiting=[each for each in state.waiting if not each.holds_blocks],
            holders=[each for each in sequences if each.holds_blocks],
            is_held_outside=bool(state.ledger.num_loads or state.ledger.num_offers),
        )

    def note_plan(self, before: Before, state: EngineState, schedule: Schedule) -> None:
        """Check the order in which a plan served its rows, and count its step for all that wait."""
        self._check_order(before, schedule)
        self._check_first(before, schedule)
        planned = {_choice(each) for each in schedule.sequences}
        budget_left = self.limits.max_num_batched_tokens - sum(schedule.plan.counts)
        for sequence in state.running:
            assert _choice(sequence) in planned or sequence.num_in_flight or not budget_left, (
                f"{sequence} was passed over"
            )
        leader = _choice(schedule.sequences[0])
        self._led[leader] = self._led.get(leader, 0) + 1
        for number, each in list(self.waiting.items()):
            if any(choice[0] == number for choice in planned):
                del self.waiting[number]
                continue
            assert leader in each.ahead, f"{each.request.lead} waits behind {leader}, which is not ahead of it"
            each.num_steps += 1

    def note_extension(self, before: Before, schedule: Schedule) -> None:
        """Check the order in which a plan was added to; who got a row does not wait any more."""
        self._check_order(before, schedule)
        for sequence in schedule.sequences:
            self.waiting.pop(sequence.request.number, None)

    def check(self, state: EngineState) -> None:
        """Assert that nobody has waited too long."""
        for number, each in list(self.waiting.items()):
            if state.requests.get(each.request.request_id) is not each.request:
                del self.waiting[number]
                continue
            bound = sum(each.ahead.values()) + self.num_lost - each.num_lost
            assert each.num_steps <= bound, (
                f"{each.request.lead} has waited {each.num_steps} steps, at most {bound} may be"
            )

    def _check_order(self, before: Before, schedule: Schedule) -> None:
        """Without KV, nobody starts or begins to pull before one that comes first and waits."""
        left = [
            each for each in before.waiting if each.state in (State.WAITING, State.PREEMPTED) and not each.holds_blocks
        ]
        if not left:
            return
        first = min(each.order for each in left)
        planned = {id(each) for each in schedule.sequences}
        for sequence in before.waiting:
            if id(sequence) in planned or sequence.state is State.WAITING_FOR_REMOTE_KVS:
                assert sequence.order < first, f"{sequence} passed one that waits"

    def _check_first(self, before: Before, schedule: Schedule) -> None:
        """The first that runs gets its full share, and keeps its blocks unless they are held outside or by one before it."""
        if not before.running or before.running[0].state not in (State.RUNNING, State.PREEMPTED):
            return
        first = before.running[0]
        if first.state is State.PREEMPTED:
            is_last = any(each.order < first.order for each in before.holders)
            assert before.is_held_outside or is_last, f"{first} runs first, and was preempted"
            return
        if schedule.sequences[0] is not first:
            assert first.num_in_flight, f"{first} runs first, and got no row"
            return
        plan = schedule.plan
        is_done = plan.starts[0] + plan.counts[0] == first.num_wanted - plan.samples[0]
        assert is_done or plan.counts[0] >= self._chunk(first.request), (
            f"{first} runs first, and got {plan.counts[0]} tokens"
        )

    def _chunk(self, request: Request) -> int:
        """Return the least tokens that a request which is first gets while it has more: all but one for each behind it."""
        num_behind = (self.limits.max_num_active_seqs or self.limits.max_num_seqs) - 1
        chunk = max(self.limits.max_num_batched_tokens - num_behind, 1)
        if self.limits.long_prefill_token_threshold:
            chunk = min(chunk, self.limits.long_prefill_token_threshold)
        if self.limits.preempted_chunk_tokens:
            chunk = min(chunk, self.limits.preempted_chunk_tokens)
        if request.wants_prompt_logprobs:
            chunk = min(chunk, MAX_PROMPT_LOGPROBS_TOKENS)
        return chunk

    def _needs(self, request: Request) -> dict[Choice, int]:
        """Return the steps that each live choice needs at most when it is always first."""
        most_output = min(request.sampling.max_tokens, self.limits.max_model_len - request.num_prompt)
        prefill = -(-(request.num_prompt + max(most_output, 0)) // self._chunk(request))
        steps = prefill + max(most_output, 0) + self.lag
        return {(request.number, choice): steps for choice in (*request.sequences, *request.held)}


def _choice(sequence: Sequence) -> Choice:
    return sequence.request.number, sequence.choice


def _has_begun(sequence: Sequence) -> bool:
    return sequence.holds_blocks or sequence.state in (State.RUNNING, State.WAITING_FOR_REMOTE_KVS)
