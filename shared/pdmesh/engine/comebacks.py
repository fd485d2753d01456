"""Preempted sequences on their way back: whether what they lack may be had elsewhere before it is computed again.

What the prefix cache still has comes by itself. When more is missing, the server is asked for a source, once the sequence's turn
has come and there is room; meanwhile others go on. It answers in time whatever happens, with a source or with none.
"""

from pdmesh.engine.engine_state import EngineState
from pdmesh.engine.kv_manager import Hit
from pdmesh.engine.messages import BlocksComputed, NeedsSource, SetSource
from pdmesh.engine.request import Sequence
from pdmesh.engine.states import Event
from pdmesh.protocol.messages import KVSource

# New full blocks of a sequence that are told to the tier at once: a call for each would cost more than the copy.
SPILL_BLOCKS = 4

LOCAL, RECOMPUTE = "local", "recompute"


class Comebacks:
    """Asks for sources and takes answers, on the engine's state; and lets the tier have what may be needed from it."""

    def __init__(self, state: EngineState) -> None:
        self._state = state

    def wants_source(self, sequence: Sequence, hit: Hit) -> bool:
        """Whether a sequence that waits should ask before it computes what `hit` does not cover."""
        comeback, least = sequence.comeback, self._state.limits.refetch_min_tokens
        return (
            comeback is not None
            and not comeback.is_settled
            and sequence.request.may_refetch
            # Who is asked may hand it back, and nobody else would draw the tokens again that are in doubt.
            and not sequence.doubted
            and least > 0
            and not sequence.wants_prompt_logprobs
            and sequence.num_tokens - hit.num_tokens >= least
        )

    def ask(self, sequence: Sequence, hit: Hit) -> None:
        """Take a sequence out of the line until the server answers."""
        state, comeback = self._state, sequence.comeback
        assert comeback is not None
        sequence.apply(Event.SOURCE_ASKED)
        state.waiting.remove(sequence)
        state.asking[sequence.request.request_id, sequence.choice] = sequence
        state.outbox.needs.append(
            NeedsSource(
                request_id=sequence.request.request_id,
                choice=sequence.choice,
                num_cached=hit.num_tokens,
                keys=self._keys(sequence, (sequence.num_tokens - 1) // state.kv.block_size),
                after=comeback.kind,
            )
        )

    def answer(self, message: SetSource) -> None:
        """Let a sequence back into the line, with a source or without; one that has ended meanwhile needs none."""
        state = self._state
        sequence = state.asking.pop((message.request_id, message.choice), None)
        if sequence is None or sequence.comeback is None:
            if message.source is not None:
                state.report_source(message.request_id, message.source, reason="aborted")
            return
        sequence.apply(Event.SOURCE_ANSWERED)
        sequence.comeback.source, sequence.comeback.kind = message.source, message.kind
        sequence.comeback.is_settled = message.source is None
        state.waiting.push(sequence)

    def cap(self, sequence: Sequence, start: int, most: int) -> int:
        """Return the most tokens a step may have of a sequence: less beside others while it computes again what it had."""
        state, least = self._state, self._state.limits.preempted_chunk_tokens
        is_again = sequence.comeback is not None or start < sequence.recompute_end
        is_alone = len(state.running) + len(state.waiting) <= 1
        return min(most, least) if least and is_again and not is_alone else most

    def note_return(self, sequence: Sequence, num_here: int) -> None:
        """A preempted sequence runs again, behind `num_here` tokens: tell by what way it came back."""
        comeback, state = sequence.comeback, self._state
        if comeback is None:
            return
        sequence.comeback, sequence.recompute_end = None, sequence.num_tokens
        num_missing = sequence.num_tokens - num_here
        where = comeback.fetched
        if not where:
            is_local = num_here > 0 and num_missing <= max(state.limits.refetch_min_tokens, state.kv.block_size)
            where = LOCAL if is_local else RECOMPUTE
        sequence.news = f"preempted:{where}"

    def spill(self, sequence: Sequence, *, at_least: int = SPILL_BLOCKS) -> None:
        """Name a sequence's full blocks that the tier has not been told of, whether computed or fetched here.

        Not pinned: of those that are overwritten before it has pulled them the generations tell. What was there before the
        prefix cache was emptied, and what rests on rounded KV, is kept from it.
        """
        state = self._state
        num_full, first = sequence.num_computed // state.kv.block_size, sequence.num_told_blocks
        if not sequence.request.store_to_tier or not sequence.may_register or num_full - first < at_least:
            return
        num_exact = min(num_full, state.kv.rounded.num_exact(sequence.blocks))
        keys = self._keys(sequence, num_exact)[first:num_exact]
        sequence.num_told_blocks = num_full
        if not keys:
            return
        described = state.kv.describe([table[first:num_exact] for table in sequence.blocks])
        before = state.kv.describe([table[:first] for table in sequence.blocks]) if first else []
        state.outbox.computed.append(
            BlocksComputed(request_id=sequence.request.request_id, keys=keys, blocks=described[0], reused=before)
        )

    def _keys(self, sequence: Sequence, count: int) -> list[bytes]:
        """Return the tier's names of the first full blocks of prompt and output; none where there is no tier for them."""
        kv = self._state.kv
        if not sequence.request.store_to_tier or any(group.window for group in kv.groups):
            return []
        return kv.tier_keys.of_leading(sequence, count)


def source_of(sequence: Sequence) -> KVSource | None:
    """Return what a waiting sequence may pull: its own source when it comes back, else the one its request came with."""
    if sequence.comeback is not None and sequence.comeback.source is not None:
        return sequence.comeback.source
    return sequence.request.source if sequence is sequence.request.lead else None
