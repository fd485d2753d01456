"""KV that goes out while it is computed: full blocks of an offer's prompt, written into the pools of consumers that expect them.

Chunk by chunk: a step's full blocks are one write, as a block holds all layers. What a write reads is referenced until the
connector has said that the write is over, whatever becomes of the request, so that no consumer gets another prompt's KV.
"""

from dataclasses import dataclass, field

from pdmesh.connector.base import PullResult, Push
from pdmesh.connector.ledger import BlockLists
from pdmesh.engine.engine_state import EngineState
from pdmesh.engine.push_messages import INVALID, BeginPush, PushReport
from pdmesh.engine.request import Sequence
from pdmesh.protocol.messages import GroupBlocks

# A write of some chunks takes milliseconds; a peer that takes longer is better left to pull.
WRITE_TIMEOUT_S = 30.0
UNWANTED = "unwanted"
RESET = "reset"
ROUNDED = "rounded"
"""Reason of a push that has come to blocks of which the consumer would have to know that they are not exact: it pulls them."""


@dataclass(slots=True, kw_only=True)
class _Outgoing:
    """One push that has not ended."""

    order: BeginPush
    num_ordered: int = 0
    """Blocks of each group, from the first target on, that writes were begun for."""
    num_reported: int = 0
    sources: list[GroupBlocks] = field(default_factory=list)
    """Of each group, the own blocks that writes were begun for."""
    num_writes: int = 0
    writes: dict[str, int] = field(default_factory=dict)
    """Those under way: the place, among the targets, of the first block of each."""
    reason: str = ""
    """Why it is over before all is written."""
    is_sealed: bool = False
    """The prompt is computed: what was written of it is not taken back any more."""
    may_write: bool = False
    """Bytes of a write that failed may still be on their way."""

    @property
    def num_targets(self) -> int:
        return len(self.order.targets[0])

    @property
    def num_written(self) -> int:
        """Leading targets that are written."""
        return min(self.writes.values(), default=self.num_ordered)

    @property
    def is_over(self) -> bool:
        return not self.writes and (bool(self.reason) or (self.is_sealed and self.num_ordered >= self.num_targets))


class Pushing:
    """All pushes from this engine. What is to be done and said goes out through the state's outbox."""

    def __init__(self, state: EngineState) -> None:
        self._state = state
        self._outgoing: dict[str, _Outgoing] = {}
        self._of_write: dict[str, _Outgoing] = {}
        self._past: set[str] = set()
        """Offers that are held and rest on what was there before the prefix cache was emptied."""

    @property
    def is_active(self) -> bool:
        return bool(self._outgoing)

    def begin(self, order: BeginPush) -> None:
        """Start to write for a consumer: what is there of the offer's prompt at once, the rest with `advance`."""
        push = self._outgoing[order.transfer_id] = _Outgoing(order=order)
        kv, state = self._state.kv, self._state
        if order.offer_id in self._past:
            self._stop(push, RESET)
            return
        if (sealed := state.ledger.offered(order.offer_id)) is not None:
            push.is_sealed = True
            self._write(push, sealed, push.num_targets + order.first_block)
            return
        for request in state.requests.values():
            if request.offer_id == order.offer_id and not request.lead.may_register:
                # It rests on what was computed before the prefix cache was emptied.
                self._stop(push, RESET)
            elif request.offer_id == order.offer_id:
                self._write(push, request.lead.blocks, request.lead.num_computed // kv.block_size)

    def advance(self, sequence: Sequence) -> None:
        """Write what has become full of a prompt that is computed for an offer."""
        request = sequence.request
        if request.offer_id and sequence is request.lead:
            for push in self._of_offer(request.offer_id):
                if not sequence.may_register:
                    self._stop(push, RESET)
                    continue
                self._write(push, sequence.blocks, sequence.num_computed // self._state.kv.block_size)

    def sealed(self, offer_id: str, blocks: BlockLists, *, is_past: bool) -> None:
        """Write what is left of an offer whose prompt is computed; `is_past`: it rests on what was there before a reset."""
        if is_past:
            self._past.add(offer_id)
        for push in self._of_offer(offer_id):
            if is_past:
                self._stop(push, RESET)
                continue
            push.is_sealed = True
            self._write(push, blocks, push.num_targets + push.order.first_block)
            if push.is_over and not push.reason:
                self._tell(push)

    def released(self, offer_id: str) -> None:
        """An offer is not held any more."""
        self._past.discard(offer_id)

    def reset(self) -> None:
        """The prefix cache has been emptied: what was computed before goes into no other engine's either."""
        self._past.update(self._state.ledger.offer_ids)
        for push in list(self._outgoing.values()):
            self._stop(push, RESET)

    def spoil(self, offer_id: str) -> None:
        """What was computed for an offer is not to be trusted."""
        for push in self._of_offer(offer_id):
            self._stop(push, INVALID)

    def stop(self, transfer_id: str, reason: str = UNWANTED) -> None:
        """End a push; one that is not known has ended, which is said again."""
        push = self._outgoing.get(transfer_id)
        if push is None:
            report = PushReport(transfer_id=transfer_id, num_blocks=0, ended=True, reason=reason)
            self._state.outbox.pushes.append(report)
        else:
            self._stop(push, reason)

    def end(self, result: PullResult) -> bool:
        """Take a connector's word on a write; False when it is about something else."""
        push = self._of_write.pop(result.transfer_id, None)
        if push is None:
            return False
        self._state.kv.drop(self._state.ledger.drop_pushed(result.transfer_id))
        # What a failed write was to bring, and all behind it, never counts as written.
        first = push.writes.pop(result.transfer_id)
        push.may_write = push.may_write or result.may_write
        if result.reason:
            push.num_ordered = min(push.num_ordered, first)
            self._stop(push, result.reason, result.num_bytes)
        else:
            self._tell(push, result.num_bytes)
        return True

    def _of_offer(self, offer_id: str) -> list[_Outgoing]:
        return [push for push in self._outgoing.values() if push.order.offer_id == offer_id]

    def _write(self, push: _Outgoing, tables: BlockLists, num_full: int) -> None:
        """Order one write of the blocks of `tables` up to `num_full` that were not ordered before."""
        order, state, start = push.order, self._state, push.num_ordered
        end = min(num_full - order.first_block, push.num_targets)
        if end <= start or push.reason:
            # A prompt that was preempted starts anew behind what was written: its blocks hold the same.
            return
        if state.kv.rounded.num_exact(tables) < order.first_block + end:
            self._stop(push, ROUNDED)
            return
        sources = [table[order.first_block + start : order.first_block + end] for table in tables]
        write_id = f"{order.transfer_id}.{push.num_writes}"
        state.kv.prompts.acquire(sources)
        state.ledger.keep_pushed(write_id, sources)
        described = state.kv.describe(sources)
        push.sources = [_joined(*pair) for pair in zip(push.sources, described, strict=True)] if start else described
        push.num_writes += 1
        push.num_ordered = end
        push.writes[write_id] = start
        self._of_write[write_id] = push
        state.outbox.writes.append(
            Push(
                transfer_id=write_id,
                peer_id=order.peer_id,
                source_block_ids=[block_id for table in sources for block_id in table],
                target_block_ids=[block_id for table in order.targets for block_id in table[start:end]],
                deadline_s=WRITE_TIMEOUT_S,
            )
        )

    def _stop(self, push: _Outgoing, reason: str, num_bytes: int = 0) -> None:
        if not push.reason:
            push.reason = reason
            self._state.outbox.cancels += push.writes
        self._tell(push, num_bytes)

    def _tell(self, push: _Outgoing, num_bytes: int = 0) -> None:
        """Report how far a push is; it is out of the table when it is over."""
        transfer_id, ended = push.order.transfer_id, push.is_over
        if ended:
            del self._outgoing[transfer_id]
        elif push.reason:
            return
        self._state.outbox.pushes.append(
            PushReport(
                transfer_id=transfer_id,
                num_blocks=push.num_written,
                num_bytes=num_bytes,
                sources=[_part(each, push.num_reported, push.num_written) for each in push.sources],
                ended=ended,
                reason=push.reason,
                may_write=push.may_write,
            )
        )
        push.num_reported = push.num_written


def _joined(one: GroupBlocks, more: GroupBlocks) -> GroupBlocks:
    return GroupBlocks(
        group=one.group, block_ids=one.block_ids + more.block_ids, generations=one.generations + more.generations
    )


def _part(blocks: GroupBlocks, start: int, end: int) -> GroupBlocks:
    return GroupBlocks(
        group=blocks.group, block_ids=blocks.block_ids[start:end], generations=blocks.generations[start:end]
    )
