"""What a consumer may read of an offer: blocks that it names, as their owner knows them, and none that its release mishandles."""

from pdmesh.errors import Forbidden, TransferFailed
from pdmesh.protocol.messages import NO_MARKS, GroupBlocks, KVMarks
from pdmesh.protocol.states import Reason
from pdmesh.protocol.transfers import OfferView


def narrowed(view: OfferView, offer_id: str, wanted: list[GroupBlocks] | None) -> OfferView:
    """Narrow an offer to the blocks a consumer names, with the generations the owner knows; all of it where it names none.

    They must be a run of the offer's, in its order: tokens are told by place. Raises Forbidden or TransferFailed (stale).
    """
    if not wanted:
        return view
    offered = {each.group: each for each in view.groups}
    groups = [
        _part(offered.get(each.group, GroupBlocks(group=each.group, block_ids=[], generations=[])), offer_id, each)
        for each in wanted
    ]
    return OfferView(groups=groups, num_tokens=view.num_tokens, marks=view.marks)


def check_unmarked(offer_id: str, marks: KVMarks) -> None:
    """Raise TransferFailed for a consumer in whose prefix cache others would find what they must not."""
    if marks != NO_MARKS:
        raise TransferFailed(
            f"{Reason.MARKED}: offer {offer_id} rests on converted KV or is from before a reset, which this consumer's "
            "release does not keep in mind"
        )


def _part(offered: GroupBlocks, offer_id: str, wanted: GroupBlocks) -> GroupBlocks:
    known = dict(zip(offered.block_ids, offered.generations, strict=True))
    if missing := [block_id for block_id in wanted.block_ids if block_id not in known]:
        raise Forbidden(f"{Reason.FOREIGN_BLOCKS}: block {missing[0]} is not in offer {offer_id}")
    generations = [known[block_id] for block_id in wanted.block_ids]
    if wanted.generations and wanted.generations != generations:
        raise TransferFailed(f"{Reason.STALE}: blocks of offer {offer_id} have newer content")
    skipped = offered.block_ids.index(wanted.block_ids[0]) if wanted.block_ids else 0
    if offered.block_ids[skipped : skipped + len(wanted.block_ids)] != wanted.block_ids:
        raise Forbidden(f"{Reason.FOREIGN_BLOCKS}: offer {offer_id} does not have these blocks in this order")
    return GroupBlocks(
        group=wanted.group,
        block_ids=wanted.block_ids,
        generations=generations,
        first_block=offered.first_block + skipped,
    )
