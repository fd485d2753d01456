"""Scheduler and KV manager under random events, without a model: after each event everything is in exactly one place.

Hypothesis picks arrivals, aborts, pulls that succeed and fail, offers released and steps; pools are tiny, so
that preemption is the rule. At the end every request has ended once, and every block is free.
"""

from collections import Counter

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from pdmesh.connector.base import Pull, PullResult
from pdmesh.engine.admission import Limits
from pdmesh.engine.block_key import block_keys, root_key
from pdmesh.engine.block_pool import BlockPool
from pdmesh.engine.kv_manager import KVGroup, KVManager
from pdmesh.engine.progress import RowResult
from pdmesh.engine.scheduler import Schedule, Scheduler
from pdmesh.engine.states import State
from pdmesh.errors import InternalError
from pdmesh.protocol.messages import GroupBlocks, KVSource
from support.core_harness import make_add

BLOCK_SIZE = 4
ROOT = root_key("m", "l", 0)
FINAL_STEPS = 3000


class EngineMachine(RuleBasedStateMachine):
    """Drives a scheduler as the core would, and keeps its own record of what was promised."""

    @initialize(
        num_blocks=st.integers(4, 24),
        max_num_seqs=st.integers(1, 6),
        budget=st.integers(1, 40),
        threshold=st.sampled_from([0, 3]),
        watermark=st.sampled_from([0, 2]),
        caching=st.booleans(),
    )
    def start(
        self, num_blocks: int, max_num_seqs: int, budget: int, threshold: int, watermark: int, caching: bool
    ) -> None:
        self.limits = Limits(
            max_num_batched_tokens=budget,
            max_num_seqs=max_num_seqs,
            max_model_len=num_blocks * BLOCK_SIZE,
            vocab_size=100,
            eos_token_ids=frozenset({1}),
            long_prefill_token_threshold=threshold,
            watermark_blocks=watermark,
        )
        group = KVGroup(blocks=BlockPool(num_blocks), block_size=BLOCK_SIZE, root=ROOT)
        self.scheduler = Scheduler(KVManager([group], enable_prefix_caching=caching), self.limits)
        self.num_added = 0
        self.open: set[tuple[str, int]] = set()
        self.sources: set[str] = set()
        self.offers: set[str] = set()
        self.sealed: list[str] = []
        self.pulls: dict[str, Pull] = {}
        self.cancelled: set[str] = set()
        self.tokens = 2

    @rule(
        length=st.integers(1, 40),
        family=st.integers(0, 2),
        n=st.sampled_from([1, 1, 1, 3, 7]),
        max_tokens=st.integers(1, 12),
        prefill_only=st.booleans(),
        has_offer=st.booleans(),
        num_emitted=st.sampled_from([0, 0, 1, 3]),
        source=st.sampled_from(["", "", "peer", "tier", "stock", "broken"]),
        policy=st.sampled_from(["recompute", "fail"]),
        wants_prompt_logprobs=st.sampled_from([False, False, True]),
    )
    def add(
        self,
        length: int,
        family: int,
        n: int,
        max_tokens: int,
        prefill_only: bool,
        has_offer: bool,
        num_emitted: int,
        source: str,
        policy: str,
        wants_prompt_logprobs: bool,
    ) -> None:
        self.num_added += 1
        request_id = f"r{self.num_added}"
        num_emitted = max(num_emitted, 1) if source == "peer" else 0 if source in ("tier", "stock") else num_emitted
        # A few families of prompts, so that prefixes are shared.
        prompt = [2 + (family * 7 + index) % 90 for index in range(length)]
        add = make_add(
            prompt,
            request_id,
            n=n,
            max_tokens=max_tokens,
            ignore_eos=False,
            prefill_only=prefill_only,
            emitted=[[3] * num_emitted] * n if num_emitted else [],
            offer_id=f"offer-{request_id}" if has_offer else "",
            store_to_tier=has_offer,
            prompt_logprobs=1 if wants_prompt_logprobs else None,
            source=_source(request_id, length, source, policy),
            recompute_last=source == "stock",
            block_keys=block_keys(prompt, BLOCK_SIZE, root=ROOT),
        )
        self.open |= {(request_id, choice) for choice in range(n)}
        if add.source is not None:
            self.sources.add(add.source.transfer_id)
        if has_offer:
            self.offers.add(add.offer_id)
        self.scheduler.add(add)
        self._collect()

    @precondition(lambda self: self.open)
    @rule(data=st.data(), everything=st.booleans())
    def abort(self, data: st.DataObject, everything: bool) -> None:
        request_id, choice = data.draw(st.sampled_from(sorted(self.open)))
        self.scheduler.abort(request_id, -1 if everything else choice)
        self._collect()
        assert (request_id, choice) not in self.open

    @rule()
    def abort_unknown(self) -> None:
        self.scheduler.abort("nobody")

    @rule(num_steps=st.integers(1, 6), result=st.sampled_from(["token", "token", "token", "eos", "nan", "crash"]))
    def step(self, num_steps: int, result: str) -> None:
        for index in range(num_steps):
            self._step(result if index == 0 else "token")

    @precondition(lambda self: self.pulls)
    @rule(data=st.data(), reason=st.sampled_from(["", "", "stale", "peer_lost"]))
    def end_pull(self, data: st.DataObject, reason: str) -> None:
        self._end_pull(data.draw(st.sampled_from(sorted(self.pulls))), reason)

    @precondition(lambda self: self.offers)
    @rule(data=st.data())
    def release_offer(self, data: st.DataObject) -> None:
        offer_id = data.draw(st.sampled_from(sorted(self.offers)))
        self.offers.discard(offer_id)
        self.scheduler.release_offer(offer_id)
        self._collect()

    @invariant()
    def is_whole(self) -> None:
        if not hasattr(self, "scheduler"):
            return
        state = self.scheduler.state
        state.check_integrity()
        assert len(state.running) <= self.limits.max_num_seqs
        assert state.ledger.num_loads == len(self.pulls)
        assert _live(self.scheduler) == self.open
        for sequence in state.running:
            assert len(sequence.blocks[0]) * BLOCK_SIZE >= sequence.num_computed
            assert 0 <= sequence.num_computed < sequence.num_tokens <= self.limits.max_model_len

    def teardown(self) -> None:
        if not hasattr(self, "scheduler"):
            return
        for _ in range(FINAL_STEPS):
            if not self.open and not self.pulls:
                break
            for transfer_id in list(self.pulls):
                self._end_pull(transfer_id, "")
            if not self._step("token"):
                # Only offers can stand in the way for good; their leases end.
                for offer_id in self.offers:
                    self.scheduler.release_offer(offer_id)
                self.offers.clear()
        assert not self.open, "a request did not end"
        for offer_id in self.offers:
            self.scheduler.release_offer(offer_id)
        assert not self.sources, "a source was not settled"
        assert self.scheduler.state.kv.num_used == 0
        self.scheduler.state.check_integrity()

    def _step(self, first_result: str) -> bool:
        schedule = self.scheduler.schedule()
        self._check_schedule(schedule)
        self._collect()
        if not schedule.rows:
            return False
        if first_result == "crash":
            self.scheduler.fail(schedule, "crashed")
        else:
            results = [
                self._result(first_result if index == 0 else "token", row) for index, row in enumerate(schedule.rows)
            ]
            self.scheduler.update(schedule, results)
        self._collect()
        return True

    def _check_schedule(self, schedule: Schedule) -> None:
        assert schedule.num_tokens <= self.limits.max_num_batched_tokens
        assert len({row.sequence.order for row in schedule.rows}) == len(schedule.rows)
        for row in schedule.rows:
            assert row.num_tokens > 0
            assert row.sequence.state is State.RUNNING
            assert row.end <= row.sequence.num_tokens
            assert len(row.sequence.blocks[0]) * BLOCK_SIZE >= row.end
        # No block that is written in this step is written by anyone else, or by a pull.
        written = Counter(
            block
            for row in schedule.rows
            for block in row.sequence.blocks[0][row.sequence.num_computed // BLOCK_SIZE : -(-row.end // BLOCK_SIZE)]
        )
        written.update(block for pull in self.pulls.values() for block in pull.target_block_ids)
        assert all(count == 1 for count in written.values())
        # Nor does any other sequence read it.
        holders = Counter(
            block
            for request in self.scheduler.state.requests.values()
            for sequence in request.sequences.values()
            for block in sequence.blocks[0]
        )
        assert all(holders[block] <= 1 for block in written)

    def _result(self, kind: str, row: object) -> RowResult:
        if kind == "nan":
            return RowResult(error=InternalError("nan"), is_nan=True)
        if not row.needs_token:  # type: ignore[attr-defined]
            return RowResult()
        self.tokens = 2 + (self.tokens + 1) % 90
        return RowResult(token_id=1 if kind == "eos" else self.tokens)

    def _end_pull(self, transfer_id: str, reason: str) -> None:
        del self.pulls[transfer_id]
        reason = reason or ("cancelled" if transfer_id in self.cancelled else "")
        self.scheduler.end_pull(
            PullResult(transfer_id=transfer_id, reason=reason, num_bytes=8, duration_s=0.0), connector="shm"
        )
        self._collect()

    def _collect(self) -> None:
        """Play the server: note what ended, and that nothing ends twice."""
        outbox = self.scheduler.state.take_outbox()
        for delta in outbox.deltas:
            key = (delta.request_id, delta.choice)
            assert key in self.open, "a delta after the end"
            handed_off = not delta.finish_reason and key not in _live(self.scheduler)
            if delta.finish_reason or handed_off:
                self.open.discard(key)
        for ended in outbox.transfers:
            self.sources.remove(ended.transfer_id)
        for sealed in outbox.sealed:
            assert sealed.offer_id in self.offers
            assert sealed.offer_id not in self.sealed
            self.sealed.append(sealed.offer_id)
        for pull in outbox.pulls:
            assert len(pull.source_block_ids) == len(pull.generations) == len(pull.target_block_ids) > 0
            self.pulls[pull.transfer_id] = pull
        self.cancelled.update(outbox.cancels)


def _live(scheduler: Scheduler) -> set[tuple[str, int]]:
    return {
        (request.request_id, choice)
        for request in scheduler.state.requests.values()
        for choice in (*request.sequences, *request.held)
    }


def _source(request_id: str, length: int, kind: str, policy: str) -> KVSource | None:
    if not kind:
        return None
    num_tokens = length // BLOCK_SIZE * BLOCK_SIZE if kind == "tier" else length
    num_blocks = -(-num_tokens // BLOCK_SIZE) + (kind == "broken")
    if num_blocks == 0:
        return None
    blocks = GroupBlocks(group=0, block_ids=list(range(num_blocks)), generations=[1] * num_blocks)
    return KVSource(
        transfer_id=f"t-{request_id}",
        peer_id="p@1",
        groups=[blocks],
        num_tokens=num_tokens,
        fail_policy=policy,
    )


TestEngine = EngineMachine.TestCase
TestEngine.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
