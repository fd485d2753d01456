"""KV that is not what was computed: which requests read it here, and how those end and those that went on behind it."""

from collections.abc import Iterable

from pdmesh.engine.engine_state import EngineState
from pdmesh.engine.plan import NO_BLOCK
from pdmesh.engine.request import Request, Sequence
from pdmesh.errors import DamagedKV, EngineFault, MeshError
from pdmesh.protocol.messages import GroupBlocks

WHAT = "KV in this engine's memory is not what was computed"


def readers(state: EngineState, damaged: Iterable[GroupBlocks]) -> list[Request]:
    """Return the live requests that hold one of the blocks, or did when they drew what is out; not those that hold it with other
    content by now.
    """
    words: dict[int, int] = {}
    for blocks in damaged:
        words.update(zip(blocks.block_ids, blocks.generations, strict=True))
    words.pop(NO_BLOCK, None)
    if not words:
        return []
    now = state.kv.generations_of(list(words))
    block_ids = {block_id for (block_id, told), found in zip(words.items(), now, strict=True) if told == found}
    return [
        request
        for request in state.requests.values()
        if any(_rests_on(each, words, block_ids) for each in request.sequences.values())
    ]


def damage_error(request: Request) -> MeshError:
    """What a request ends with that has read damaged KV: computed elsewhere it is right, unless a token of it is out."""
    live = request.sequences.values()
    has_ended = len(live) + len(request.held) < request.num_choices
    if has_ended or any(each.has_reported or each.unsent_token_ids for each in live):
        return DamagedKV(f"{WHAT}: tokens of this request that are out may be wrong")
    return EngineFault(f"{WHAT}: it may be computed elsewhere")


def token_error(wanted: int, token_id: int) -> MeshError:
    """What a choice ends with when `wanted` was given out and KV that was computed anew gives another token."""
    return DamagedKV(
        f"a token that was given out ({wanted}) was drawn from damaged KV: from KV computed anew it is {token_id}"
    )


def _rests_on(sequence: Sequence, words: dict[int, int], block_ids: set[int]) -> bool:
    is_held = any(not block_ids.isdisjoint(table) for table in sequence.blocks)
    return is_held or any(words.get(block_id) == word for block_id, word in sequence.lost_blocks.items())
