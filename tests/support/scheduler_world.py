"""Scheduler and KV manager with all that surrounds them, without a model: clients, server, peers, and a worker that runs plans.

A test calls the events; the world executes the plans, keeps its own record of what was promised, and asserts after every
event that everything is in exactly one place, that budgets hold, that each choice gets its own tokens in order, and that
nobody waits longer than `docs/scheduler.md` says.
"""

from collections import Counter, deque
from dataclasses import dataclass, field
from unittest.mock import patch

from pdmesh.connector.base import Pull, PullResult
from pdmesh.engine.block_hash import BlockHasher
from pdmesh.engine.block_key import block_keys
from pdmesh.engine.block_pool import BlockPool
from pdmesh.engine.kv_groups import KVGroup, blocks_at_once
from pdmesh.engine.kv_manager import KVManager
from pdmesh.engine.limits import Limits
from pdmesh.engine.messages import AddRequest, BlocksComputed, NeedsSource, OfferSealed, SetSource
from pdmesh.engine.request import BrokenSequence, Sequence
from pdmesh.engine.schedule import Schedule
from pdmesh.engine.scheduler import Scheduler
from pdmesh.engine.states import State
from pdmesh.protocol.messages import ChoiceDelta
from support.plan_worker import EOS, GARBAGE, PlanWorker, Script, chain, table_blocks
from support.scheduler_wish import BLOCK_SIZE, BLOCKS_PER_GROUP, ROOT, Told, Wish, add_request, continued, make_source
from support.waiting_bound import WaitingBound

VOCAB_SIZE = 100
MAX_FINAL_EVENTS = 20_000
# A step may be planned while the one before it runs.
MAX_LAG = 1


@dataclass(frozen=True, kw_only=True)
class WorldConfig:
    num_blocks: int = 16
    windows: tuple[int, ...] = (0,)
    """One group each; 0 is full attention."""
    max_num_seqs: int = 4
    max_num_active_seqs: int = 0
    budget: int = 16
    threshold: int = 0
    is_adaptive: bool = False
    max_partial: int = 0
    watermark: int = 0
    caching: bool = True
    by_priority: bool = False
    aging_s: float = 0.0
    is_async: bool = True
    stream_interval: int = 1
    max_num_queued_reqs: int = 4096
    max_num_queued_tokens: int = 0
    refetch_min: int = 0
    preempted_chunk: int = 0
    spill_usage: float = 1.0


@dataclass
class UnderWay:
    schedule: Schedule
    is_crashing: bool
    is_after_crash: bool
    """Planned before a crash under way was known."""


@dataclass
class OpenPull:
    pull: Pull
    script: Script
    tokens: list[int]
    era: int
    barrier: int
    """Steps that may write to its blocks: it starts when they have ended."""
    is_cancelled: bool = False


@dataclass
class Held:
    """An offer that has been sealed."""

    sealed: OfferSealed
    script: Script = field(repr=False)


class World:
    """See the module. Times are in seconds of a clock that only `wait` moves."""

    def __init__(self, config: WorldConfig) -> None:
        self.config = config
        groups = [KVGroup(BLOCK_SIZE, "sliding" if window else "full", window) for window in config.windows]
        self.limits = Limits(
            max_num_batched_tokens=config.budget,
            max_num_seqs=config.max_num_seqs,
            max_model_len=_longest(groups, config),
            vocab_size=VOCAB_SIZE,
            eos_token_ids=frozenset({EOS}),
            max_num_active_seqs=min(config.max_num_active_seqs, config.max_num_seqs),
            long_prefill_token_threshold=config.threshold,
            is_threshold_adaptive=config.is_adaptive,
            max_num_partial_prefills=config.max_partial,
            by_priority=config.by_priority,
            priority_aging_s=config.aging_s,
            watermark_blocks=config.watermark,
            max_num_queued_reqs=config.max_num_queued_reqs,
            max_num_queued_tokens=config.max_num_queued_tokens,
            stream_interval=config.stream_interval,
            refetch_min_tokens=config.refetch_min,
            preempted_chunk_tokens=config.preempted_chunk,
            spill_usage=config.spill_usage,
        )
        self.pool = BlockPool(config.num_blocks, len(groups))
        kv = KVManager(
            groups,
            self.pool,
            BlockHasher("xxhash", "seed", BLOCK_SIZE),
            max_chunk_tokens=config.budget,
            tier_root=ROOT,
            enable_prefix_caching=config.caching,
        )
        self.scheduler = Scheduler(kv, self.limits)
        # A bug ends its request; here it is to fail the test.
        self.scheduler.expel = _raise  # type: ignore[method-assign]
        self.state = self.scheduler.state
        self.worker = PlanWorker(groups, config.num_blocks, config.max_num_seqs, lambda number: self.scripts[number])
        self.bound = WaitingBound(self.limits, lag=MAX_LAG if config.is_async else 0)
        self._preempt, self.state.preempt = self.state.preempt, self._note_preemption  # type: ignore[method-assign]
        self.scripts: dict[int, Script] = {}
        self.wishes: dict[str, Wish] = {}
        self.open: dict[tuple[str, int], Told] = {}
        self.unsettled: set[str] = set()
        """Transfers whose end the server has not been told."""
        self.offers: dict[str, Script] = {}
        """Asked for and not released."""
        self.held: dict[str, Held] = {}
        self.needs: list[NeedsSource] = []
        """Not answered."""
        self.refetches: dict[str, list[int]] = {}
        """Transfer -> the tokens whose KV it is of, for sources that were asked for."""
        self.pulls: dict[str, OpenPull] = {}
        self.crashed: set[str] = set()
        """Requests in steps that crashed."""
        self.under_way: deque[UnderWay] = deque()
        self.num_planned = 0
        self.num_ended = 0
        self.num_unsafe = 0
        """Steps that must have ended before a pull may write to blocks that are free now."""
        self.num_events = 0
        self.num_extended = 0
        """Rows that were added to a plan."""
        self.now = 0
        """Seconds, on the scheduler's clock."""

    # ---- events ---------------------------------------------------------------------------------

    def add(self, wish: Wish) -> str:
        """A request arrives; returns its id."""
        number = len(self.scripts) + 1
        request_id = f"r{number}"
        script = self.scripts[number] = wish.script(number, self.worker.era)
        self.wishes[request_id] = wish
        for choice in range(wish.n):
            tokens = [*wish.prompt, *continued(script, choice, wish.emitted)]
            self.open[request_id, choice] = Told(wish, script, choice, tokens, len(tokens))
        add = add_request(wish, script, self.state.kv.groups)
        if add.source is not None:
            self.unsettled.add(add.source.transfer_id)
        if add.offer_id:
            self.offers[add.offer_id] = script
        self._send(add)
        self._after_event()
        return request_id

    def _send(self, add: AddRequest) -> None:
        with patch("pdmesh.engine.admission.time", self):
            self.scheduler.add(add)
        request = self.state.requests.get(add.request.request_id)
        if request is None:
            return
        priority = add.request.priority if self.config.by_priority else 0
        rank = self.now + priority * self.config.aging_s if self.config.aging_s else priority
        assert request.lead.order == (rank, request.number, 0)
        self.bound.note_arrival(self.state, request)

    def monotonic(self) -> float:
        return self.now

    def abort(self, request_id: str, choice: int = -1) -> None:
        self.scheduler.abort(request_id, choice)
        self._after_event()
        assert all(key[0] != request_id or choice not in (-1, key[1]) for key in self.open), "an abort was not answered"

    def plan(self, *, is_crashing: bool = False) -> bool:
        """The core plans a step, if it may; returns whether there was one."""
        if len(self.under_way) > (MAX_LAG if self.config.is_async else 0) or self._copies_under_way:
            return False
        before = self.bound.look(self.state)
        is_alone = len(self.state.running) + len(self.state.waiting) == 1
        schedule = self.scheduler.schedule()
        self._note_strays(self.num_planned)
        if schedule.is_empty:
            self._check_idle()
            self._after_event()
            return False
        self.num_planned += 1
        self._note_copies(schedule)
        self._check_plan(schedule, is_alone=is_alone)
        if schedule.sequences:
            self.bound.note_plan(before, self.state, schedule)
        is_after_crash = any(step.is_crashing for step in self.under_way)
        self.under_way.append(UnderWay(schedule, is_crashing, is_after_crash))
        self._after_event()
        return True

    def extend(self) -> None:
        """The core has the last plan back, adds who came meanwhile, and submits it again."""
        schedule = self.under_way[-1].schedule
        before, num_rows = self.bound.look(self.state), len(schedule.sequences)
        self.scheduler.extend(schedule)
        self._note_strays(self.num_planned - 1)
        self._note_copies(schedule)
        # The rows that were there may have got more than the threshold, while they were alone.
        self._check_plan(schedule, is_alone=True)
        if self.limits.long_prefill_token_threshold and not self.limits.is_threshold_adaptive:
            assert max(schedule.plan.counts[num_rows:], default=0) <= self.limits.long_prefill_token_threshold
        self.bound.note_extension(before, schedule)
        self.num_extended += len(schedule.sequences) - num_rows
        self._after_event()

    @property
    def may_extend(self) -> bool:
        """Whether the last plan could be added to. None has begun that has not ended: as late as can be."""
        return bool(self.under_way) and self.scheduler.may_extend(self.under_way[-1].schedule)

    def end_step(self) -> bool:
        """The oldest step under way is executed and ends; returns whether there was one."""
        if not self.under_way:
            return False
        step = self.under_way.popleft()
        self.num_ended += 1
        result = self.worker.run(step.schedule.plan, is_crashing=step.is_crashing, is_after_crash=step.is_after_crash)
        failed = [step.schedule.sequences[index] for index in result.failures]
        broken = [block for each in failed for block in table_blocks(each.blocks)]
        if step.is_crashing:
            self.crashed |= {each.request.request_id for each in step.schedule.sequences}
            self.scheduler.fail(step.schedule, "crashed")
        else:
            self.scheduler.update(step.schedule, result)
        sources = {source for each in self.under_way for source, _ in each.schedule.plan.copies}
        for block in broken:
            # KV that led to NaN may be broken itself: who finds it from now on gets garbage.
            if self.pool.is_free(block) and block not in sources:
                self.worker.content[block] = [GARBAGE] * BLOCK_SIZE
        self._after_event()
        return True

    def answer(self, need: NeedsSource, what: str) -> None:
        """The server has looked: `what` is none, offer (the prompt), tier (all full blocks) or broken."""
        self.needs.remove(need)
        sequence = self.state.asking.get((need.request_id, need.choice))
        source = None
        if what != "none":
            wish = self.wishes[need.request_id]
            script = self.scripts[int(need.request_id.removeprefix("r"))]
            tokens = sequence.tokens.view(0, sequence.num_tokens).tolist() if sequence is not None else script.prompt
            num_tokens = len(wish.prompt) if what == "offer" else len(tokens) // BLOCK_SIZE * BLOCK_SIZE
            transfer_id = f"t-{need.request_id}-{self.num_events}"
            source = make_source(
                transfer_id, self.state.kv.groups, num_tokens, num_extra=what == "broken", fail_policy="recompute"
            )
            if source is not None:
                self.unsettled.add(transfer_id)
                self.refetches[transfer_id] = tokens
        kind = what if source is not None else ""
        self.scheduler.comebacks.answer(
            SetSource(request_id=need.request_id, choice=need.choice, source=source, kind=kind)
        )
        self._after_event()

    def can_end_pull(self, transfer_id: str) -> bool:
        return self.pulls[transfer_id].barrier <= self.num_ended

    def end_pull(self, transfer_id: str, reason: str = "") -> None:
        """A pull ends; with a reason it has failed, and written garbage."""
        assert self.can_end_pull(transfer_id)
        ended = self.pulls.pop(transfer_id)
        reason = reason or ("cancelled" if ended.is_cancelled and len(self.scripts) % 2 else "")
        for source, target in zip(ended.pull.source_block_ids, ended.pull.target_block_ids, strict=True):
            group, place = divmod(source, BLOCKS_PER_GROUP)
            values = chain(ended.script.salt, group, ended.era, ended.tokens)[
                place * BLOCK_SIZE : (place + 1) * BLOCK_SIZE
            ]
            held = [GARBAGE] * BLOCK_SIZE if reason else values + [GARBAGE] * (BLOCK_SIZE - len(values))
            self.worker.content[target] = held
        self.scheduler.end_pull(
            PullResult(transfer_id=transfer_id, reason=reason, num_bytes=8, duration_s=0.0), connector="shm"
        )
        self._after_event()

    def release_offer(self, offer_id: str) -> None:
        held = self.held.pop(offer_id, None)
        del self.offers[offer_id]
        if held is not None:
            self._check_offer(held)
        self.scheduler.release_offer(offer_id)
        self._after_event()

    def reset_prefix_cache(self) -> None:
        self.scheduler.reset_prefix_cache()
        self.worker.era += 1
        self._after_event()

    def preempt(self, sequence: Sequence) -> None:
        """Take a running sequence's blocks away, as if there were no room."""
        self.state.preempt(sequence)
        self._after_event()

    def finish(self) -> None:
        """Let everything run to its end; then nothing is left."""
        for _ in range(MAX_FINAL_EVENTS):
            for transfer_id in [each for each in self.pulls if self.can_end_pull(each)]:
                self.end_pull(transfer_id)
            for need in list(self.needs):
                self.answer(need, "none")
            did_plan, did_end = self.plan(), self.end_step()
            if not did_plan and not did_end:
                if not self.pulls and not self.offers and not self.needs:
                    break
                # Only offers can stand in the way for good; their leases end.
                for offer_id in list(self.offers):
                    self.release_offer(offer_id)
        assert not self.open, f"not ended: {sorted(self.open)}, offers {list(self.offers)}, pulls {list(self.pulls)}"
        assert not self.unsettled, "a source was not settled"
        assert self.state.kv.num_used == 0
        assert not self.state.requests

    @property
    def _copies_under_way(self) -> bool:
        return bool(self.under_way) and bool(self.under_way[-1].schedule.plan.copies)

    def _note_strays(self, num_planned: int) -> None:
        if self.state.take_strays():
            self.num_unsafe = num_planned

    def _note_copies(self, schedule: Schedule) -> None:
        if schedule.plan.copies:
            self.num_unsafe = self.num_planned

    def _note_preemption(self, sequence: Sequence) -> None:
        self._preempt(sequence)
        self.bound.note_preemption(sequence)

    # ---- checks ---------------------------------------------------------------------------------

    def _after_event(self) -> None:
        self.num_events += 1
        self._note_strays(self.num_planned)
        self._collect()
        state, limits = self.state, self.limits
        state.check_integrity()
        assert len(state.running) <= (limits.max_num_active_seqs or limits.max_num_seqs)
        assert state.ledger.num_loads == len(self.pulls)
        assert state.ledger.num_offers == len(self.held)
        live = {
            (each.request_id, choice) for each in state.requests.values() for choice in (*each.sequences, *each.held)
        }
        assert live == self.open.keys(), "requests and what clients wait for differ"
        assert state.running == sorted(state.running, key=lambda each: each.order)
        for sequence in state.running:
            assert sequence.num_computed <= sequence.num_planned <= sequence.num_wanted
            assert sequence.num_tokens <= limits.max_model_len
        self.bound.check(self.state)

    def _check_plan(self, schedule: Schedule, *, is_alone: bool) -> None:
        plan = schedule.plan
        assert sum(plan.counts) <= self.limits.max_num_batched_tokens
        assert len({(each.request.number, each.choice) for each in schedule.sequences}) == len(plan.rows)
        assert all(each.state is State.RUNNING for each in schedule.sequences)
        assert [each.row for each in schedule.sequences] == plan.rows
        if self.limits.long_prefill_token_threshold and not self.limits.is_threshold_adaptive and not is_alone:
            assert max(plan.counts, default=0) <= self.limits.long_prefill_token_threshold
        if self.limits.max_num_partial_prefills:
            partial = sum(each.num_planned + 1 < each.num_tokens for each in self.state.running)
            assert partial <= self.limits.max_num_partial_prefills, "too many prompts are computed in part"
        holders = Counter(
            block
            for request in self.state.requests.values()
            for sequence in request.sequences.values()
            for block in table_blocks(sequence.blocks)
        )
        targets = {block for each in self.pulls.values() for block in each.pull.target_block_ids}
        for sequence, start, count in zip(schedule.sequences, plan.starts, plan.counts, strict=True):
            first, end = start // BLOCK_SIZE, -(-(start + count) // BLOCK_SIZE)
            for table in sequence.blocks:
                assert all(holders[block] == 1 for block in table[first:end]), "a block that will be written is shared"
                assert not targets & set(table[first:end]), "a step writes where a pull writes"

    def _check_idle(self) -> None:
        """An empty plan is right only while something else must happen first."""
        if self.under_way or self.state.ledger.num_loads or self.state.ledger.num_offers or self.state.asking:
            return
        assert not self.state.running, "running, but nothing is planned"
        assert not self.state.waiting, f"waiting, but nothing is planned or under way: {list(self.state.waiting)}"

    def _check_offer(self, held: Held) -> None:
        num_tokens, script = held.sealed.num_tokens, held.script
        tokens = [*script.prompt, *continued(script, 0, num_tokens - len(script.prompt))]
        assert len(tokens) == num_tokens
        for blocks in held.sealed.groups:
            window = self.config.windows[blocks.group]
            low = max(num_tokens - window, 0) if window else 0
            places = {blocks.first_block + index: block for index, block in enumerate(blocks.block_ids)}
            assert self._is_kv_of(script, blocks.group, places, tokens, low), (
                f"offer {held.sealed.offer_id}: not its KV"
            )

    def _is_kv_of(self, script: Script, group: int, places: dict[int, int], tokens: list[int], low: int = 0) -> bool:
        """Whether blocks, by their places, hold the KV of a request's tokens from `low` on."""
        for era in range(self.worker.era + 1):
            values = chain(script.salt, group, era, tokens)
            expected = {place: values[place * BLOCK_SIZE : (place + 1) * BLOCK_SIZE] for place in places}
            skipped = {place: max(low - place * BLOCK_SIZE, 0) for place in places}
            if all(
                self.worker.content[block][skipped[place] : len(expected[place])] == expected[place][skipped[place] :]
                for place, block in places.items()
            ):
                return True
        return False

    # ---- the server -----------------------------------------------------------------------------

    def _collect(self) -> None:
        """Play the server: everything is said once, in order, and to who waits for it."""
        outbox = self.state.take_outbox()
        for delta in outbox.deltas:
            self._take_delta(delta)
        for ended in outbox.transfers:
            self.unsettled.remove(ended.transfer_id)
        for sealed in outbox.sealed:
            assert sealed.offer_id in self.offers
            assert sealed.offer_id not in self.held
            self.held[sealed.offer_id] = Held(sealed, self.offers[sealed.offer_id])
            self._check_offer(self.held[sealed.offer_id])
        for computed in outbox.computed:
            self._check_computed(computed)
        self.needs += outbox.needs
        for pull in outbox.pulls:
            assert len(pull.source_block_ids) == len(pull.generations) == len(pull.target_block_ids) > 0
            script = self.scripts[int(pull.transfer_id.split("-")[1].removeprefix("r"))]
            tokens = self.refetches.get(pull.transfer_id) or [
                *script.prompt,
                *continued(script, 0, self.wishes[f"r{script.number}"].emitted),
            ]
            self.pulls[pull.transfer_id] = OpenPull(pull, script, tokens, self.worker.era, self.num_unsafe)
        for transfer_id in outbox.cancels:
            self.pulls[transfer_id].is_cancelled = True

    def _take_delta(self, delta: ChoiceDelta) -> None:
        key = (delta.request_id, delta.choice)
        told = self.open.get(key)
        assert told is not None, f"a delta after the end of {key}"
        has_crashed = delta.request_id in self.crashed
        told.take(delta, max_model_len=self.limits.max_model_len, has_crashed=has_crashed)
        # A prefill-only choice ends with its first token, which is told by there being no more.
        if delta.finish_reason or told.wish.prefill_only:
            del self.open[key]

    def _check_computed(self, computed: BlocksComputed) -> None:
        script = self.scripts[int(computed.request_id.removeprefix("r"))]
        for choice in range(self.wishes[computed.request_id].n):
            tokens = [*script.prompt, *continued(script, choice, self.limits.max_model_len)]
            names = block_keys(tokens, BLOCK_SIZE, root=ROOT, cache_salt=script.salt)
            if computed.keys[-1] in names:
                break
        places = {names.index(key): block for key, block in zip(computed.keys, computed.blocks.block_ids, strict=True)}
        is_kv = self._is_kv_of(script, 0, places, tokens)
        assert is_kv, f"{computed.request_id} told the tier of blocks that are not its own"


def _raise(broken: BrokenSequence) -> None:
    raise AssertionError(f"{broken.sequence}: {broken}") from broken


def _longest(groups: list[KVGroup], config: WorldConfig) -> int:
    """Return the longest sequence that fits when it is alone."""
    length = 1
    while blocks_at_once(groups, length + 1, config.budget) <= config.num_blocks and length < config.num_blocks * 4:
        length += 1
    return length
