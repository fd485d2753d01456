"""KV from elsewhere and for elsewhere: sequences that wait for a pull, and prompts that are kept for an offer.

A pull never blocks a step: its sequence leaves the waiting queue with its blocks allocated and returns when the connector
reports the end. Every source that a request brings ends in exactly one TransferEnded, whatever happens to the request.
"""

from dataclasses import replace
from enum import Enum, auto

from pdmesh.connector.active import PullEnd
from pdmesh.connector.base import Pull, PullResult
from pdmesh.connector.ledger import BlockLists, Load, PullPlan, plan_pull
from pdmesh.engine.comebacks import source_of
from pdmesh.engine.conversion import ConvertingPull, GroupPart, plan_conversion
from pdmesh.engine.engine_state import EngineState
from pdmesh.engine.kv_manager import Hit
from pdmesh.engine.landings import Landings
from pdmesh.engine.messages import BlocksComputed, OfferSealed, TransferEnded
from pdmesh.engine.push_messages import PUSH_SOURCE
from pdmesh.engine.pushing import Pushing
from pdmesh.engine.request import Sequence
from pdmesh.engine.states import Event
from pdmesh.errors import TransferFailed
from pdmesh.protocol.messages import KVMarks, KVSource

CONVERTED = "+converted"
"""Behind the connector in `kv_source` when the peer's blocks were of another layout."""


class Begun(Enum):
    """What became of a sequence's source at admission."""

    PULLING = auto()
    """The sequence has left the queue."""
    NO_ROOM = auto()
    SETTLED = auto()
    """No pull: everything is here, or the source is of no use; go on by computing."""
    FAILED = auto()
    """The sequence has ended."""


class RemoteKV:
    """Begins and ends pulls and offers on the engine's state."""

    def __init__(self, state: EngineState) -> None:
        self._state = state
        self.pushing = Pushing(state)
        self.landings = Landings(state)

    def begin(self, sequence: Sequence, hit: Hit, *, reserve: int) -> Begun:
        """Start to pull what `hit` does not cover of the source of a waiting sequence."""
        state, source = self._state, source_of(sequence)
        assert source is not None
        if sequence.wants_prompt_logprobs:
            # Every position has to be computed anyway.
            self._end_source(sequence, source, reason="")
            return Begun.SETTLED
        start = _first_query(sequence, source)
        num_hit = hit.num_tokens // state.kv.block_size
        firsts = [max(num_hit, group.first_needed(start)) for group in state.kv.groups]
        try:
            if source.num_tokens > sequence.num_tokens:
                raise TransferFailed("mismatch")
            plan: PullPlan | list[GroupPart] | None
            if source.layouts:
                plan = plan_conversion(source, state.kv.groups, num_hit_tokens=hit.num_tokens, start=start)
            else:
                plan = plan_pull(source, firsts=firsts, block_size=state.kv.block_size)
        except TransferFailed as exc:
            self._end_source(sequence, source, reason=exc.message)
            return self._fall_back(sequence, source, exc.message)
        if plan is None:
            self._end_source(sequence, source, reason="")
            return Begun.SETTLED
        if not state.kv.allocate(sequence, source.num_tokens, hit=hit, start=start, reserve=reserve):
            return Begun.NO_ROOM
        targets = [table[first:] for table, first in zip(sequence.blocks, firsts, strict=True)]
        pull = _pull(source, plan, targets)
        self._leave_queue(sequence, source, hit, num_usable=start, unnamed=_unnamed(pull, firsts))
        self.note_hits(sequence, hit.num_tokens)
        state.counters.external_queries += source.num_tokens - hit.num_tokens
        state.outbox.pulls.append(pull)
        return Begun.PULLING

    def note_hits(self, sequence: Sequence, num_tokens: int) -> None:
        """Let a sequence begin behind what was found here, by a push perhaps, which has served its purpose then."""
        self._state.note_hits(sequence, num_tokens)
        if sequence.request.push_id:
            self.landings.claim(sequence, num_tokens)

    def end(self, result: PullResult, connector: str) -> Sequence | None:
        """Take a connector's word on a pull; return the sequence that may go on computing, if there is one.

        Failed KV is never read: its blocks go back before anything else happens.
        """
        if self.pushing.end(result):
            return None
        state = self._state
        load = state.ledger.end_load(result.transfer_id, arrived=not result.reason)
        if load is None:
            return None
        sequence = load.owner
        reason = result.reason or ("" if sequence is not None else "aborted")
        self._report(load, result, reason, way=connector)
        if sequence is None:
            state.kv.drop(load.quarantined)
            return None
        if reason:
            state.kv.release(sequence)
            sequence.num_reused_tokens = 0
            if reason == PullEnd.CORRUPT:
                _doubt(sequence, load.source)
            sequence.apply(Event.PULL_FAILED)
            state.waiting.push(sequence)
            return None if self._fall_back(sequence, load.source, reason) is Begun.FAILED else sequence
        state.counters.external_hits += max(load.num_tokens - load.num_hit, 0)
        sequence.num_computed = sequence.num_planned = sequence.num_reused_tokens = load.num_tokens
        sequence.kv_bytes = result.num_bytes
        marks = load.source.marks
        if marks.num_exact_tokens is not None:
            first = max(load.num_hit, marks.num_exact_tokens) // state.kv.block_size
            state.kv.rounded.mark(sequence.blocks, first)
        if marks.before_reset or (load.source.num_resets is not None and load.source.num_resets < state.num_resets):
            sequence.may_register = False
        if sequence.comeback is not None and sequence.comeback.kind:
            sequence.comeback.fetched = sequence.comeback.kind
        elif sequence.kv_source != PUSH_SOURCE:
            sequence.kv_source = "tier" if load.from_tier else connector + CONVERTED * bool(load.source.layouts)
        sequence.apply(Event.PULL_SUCCEEDED)
        state.kv.register(sequence, unnamed=load.unnamed)
        state.waiting.push(sequence)
        return sequence

    def forget_pushed(self) -> None:
        """The prefix cache has been emptied: what was computed before goes into no other engine's either."""
        self.pushing.reset()
        self.landings.reset()

    def seal_offer(self, sequence: Sequence) -> None:
        """Keep the computed prompt's blocks for the request's offer and report them."""
        state, request = self._state, sequence.request
        blocks = state.kv.hold(sequence, request.num_offered)
        state.ledger.hold_offer(request.offer_id, blocks)
        self.pushing.sealed(request.offer_id, blocks, is_past=not sequence.may_register)
        num_exact = state.kv.rounded.num_exact(blocks) * state.kv.block_size
        state.outbox.sealed.append(
            OfferSealed(
                offer_id=request.offer_id,
                request_id=request.request_id,
                groups=state.kv.describe(blocks),
                num_tokens=request.num_offered,
                marks=KVMarks(
                    num_exact_tokens=num_exact if num_exact < request.num_offered else None,
                    before_reset=not sequence.may_register,
                ),
                num_reused=sequence.num_reused_tokens,
                digest=request.digest,
                grows=sequence.num_tokens > request.num_offered
                or not (request.prefill_only or request.sampling.max_tokens == 1),
            )
        )
        request.offer_id = ""

    def release_offer(self, offer_id: str) -> None:
        """Let an offer's blocks go; one that is not sealed yet never will be. Unknown offers are ignored."""
        self.pushing.released(offer_id)
        blocks = self._state.ledger.release_offer(offer_id)
        if blocks is not None:
            self._state.kv.drop(blocks)
            return
        for request in self._state.requests.values():
            if request.offer_id == offer_id:
                request.offer_id = ""

    def report_computed(self, sequence: Sequence) -> None:
        """Name the full prompt blocks that were computed here, so that the tier may pull them.

        The tier keeps histories: a model with sliding groups has nothing for it. What was there before the prefix cache was
        emptied, and what rests on rounded KV, is not for others.
        """
        kv = self._state.kv
        if not sequence.may_register:
            return
        first = sequence.num_reused_tokens // kv.block_size
        keys = kv.tier_keys.of_prompt(sequence)[first : kv.rounded.num_exact(sequence.blocks)]
        if not keys or any(group.window for group in kv.groups):
            return
        if first == 0:
            sequence.num_told_blocks = len(keys)
        described = kv.describe([blocks[first : first + len(keys)] for blocks in sequence.blocks])
        self._state.outbox.computed.append(
            BlocksComputed(
                request_id=sequence.request.request_id,
                keys=keys,
                blocks=described[0],
                reused=kv.describe([blocks[:first] for blocks in sequence.blocks]) if first else [],
            )
        )

    def _leave_queue(
        self, sequence: Sequence, source: KVSource, hit: Hit, *, num_usable: int, unnamed: frozenset[tuple[int, int]]
    ) -> None:
        state, request = self._state, sequence.request
        sequence.apply(Event.PULL_STARTED)
        state.waiting.remove(sequence)
        if sequence.comeback is not None and sequence.comeback.source is source:
            sequence.comeback.source = None
        else:
            request.source = None
        # A peer's source is continued after its last token; one that begins a fresh prompt can only be the tier's.
        from_tier = sequence.num_emitted == 0 and not request.recompute_last
        state.ledger.begin_load(
            Load(
                source=source,
                request_id=request.request_id,
                owner=sequence,
                num_tokens=num_usable,
                num_hit=hit.num_tokens,
                from_tier=from_tier,
                unnamed=unnamed,
            )
        )

    def _end_source(self, sequence: Sequence, source: KVSource, *, reason: str) -> None:
        """Tell the server that a source is not pulled; without a reason because nothing of it is missing."""
        comeback = sequence.comeback
        if comeback is None or comeback.source is not source:
            self._state.end_source(sequence.request, source, reason=reason)
            return
        comeback.source, comeback.is_settled = None, not reason
        self._state.report_source(sequence.request.request_id, source, reason=reason)

    def _fall_back(self, sequence: Sequence, source: KVSource, reason: str) -> Begun:
        """Apply the failure policy to a waiting sequence without blocks."""
        if sequence.comeback is not None and sequence.comeback.kind:
            # Another source may be left, and computing always is.
            return Begun.SETTLED
        if source.fail_policy == "fail":
            error = TransferFailed(f"the KV of this request could not be fetched: {reason}")
            self._state.finish(sequence, Event.FAILED, error=error)
            return Begun.FAILED
        sequence.kv_source = f"recompute:{reason}"
        return Begun.SETTLED

    def _report(self, load: Load[Sequence], result: PullResult, reason: str, *, way: str) -> None:
        self._state.outbox.transfers.append(
            TransferEnded(
                transfer_id=result.transfer_id,
                peer_id=load.source.peer_id,
                request_id=load.request_id,
                committed=not reason,
                reason=reason,
                num_bytes=result.num_bytes,
                duration_s=result.duration_s,
                way=way,
                damaged=list(result.damaged),
            )
        )


def _pull(source: KVSource, plan: PullPlan | list[GroupPart], targets: BlockLists) -> Pull | ConvertingPull:
    """Order what was planned into `targets`, each group's blocks from its first needed one on."""
    if isinstance(plan, PullPlan):
        return Pull(
            transfer_id=source.transfer_id,
            peer_id=source.peer_id,
            source_block_ids=plan.source_block_ids,
            generations=plan.generations,
            checksums=plan.checksums,
            target_block_ids=[block for blocks in targets for block in blocks],
            deadline_s=source.deadline_s,
            offer_id=source.offer_id,
            connector=source.connector,
        )
    return ConvertingPull(
        transfer_id=source.transfer_id,
        peer_id=source.peer_id,
        parts=[replace(part, target_block_ids=targets[part.group]) for part in plan],
        deadline_s=source.deadline_s,
        offer_id=source.offer_id,
        connector=source.connector,
    )


def _unnamed(pull: Pull | ConvertingPull, firsts: list[int]) -> frozenset[tuple[int, int]]:
    """Return (group, place) of the blocks that stay without their first tokens: nobody may find them by their whole content."""
    parts = pull.parts if isinstance(pull, ConvertingPull) else []
    return frozenset((part.group, firsts[part.group]) for part in parts if part.starts_inside_a_block)


def _doubt(sequence: Sequence, source: KVSource) -> None:
    """Have what the owner of damaged KV may have drawn from it drawn again: noise is a function of place, so it comes out the
    same where all is well.
    """
    request = sequence.request
    # What the sequence has drawn itself rests on KV that was whole when it was fetched, and the tier draws nothing.
    if source.offer_id and sequence.comeback is None and source.num_tokens < sequence.num_tokens:
        request.doubted_from = source.num_tokens
        sequence.doubt(source.num_tokens)


def _first_query(sequence: Sequence, source: KVSource) -> int:
    """Return the first position that is computed behind a source's KV; at least one always is."""
    usable = source.num_tokens - 1 if sequence.request.recompute_last else source.num_tokens
    return min(usable, sequence.num_tokens - 1)
