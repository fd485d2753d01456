"""Notices between cores: an owner's core tells of an offer, and a consumer's lets the request that awaits it run ahead.

The server hands such a request over when it begins to wait at the offer's owner. With a notice it goes on at once, else when the
server says so. In either case the server's word follows, exactly once: the whole request again, which adds nothing to one that
runs already, or that it is dropped.
"""

import logging

import msgspec
import numpy as np

from pdmesh.connector.notices import OfferNotice
from pdmesh.connector.pool import KVPool
from pdmesh.engine.links import Links
from pdmesh.engine.messages import AddRequest, OfferSealed
from pdmesh.protocol.messages import ChoiceDelta, GroupBlocks
from pdmesh_kernels.block_sum import sum_blocks

log = logging.getLogger(__name__)

# The core stands still while it sums them: 3 to 5 ms at the most. What takes longer to copy gains little by a notice.
MAX_SUMMED_BYTES = 64 << 20


class _BlockSums:
    """What blocks summed to when they had been computed. Nothing is summed later: it may be damaged by then."""

    def __init__(self, pool: KVPool, block_size: int) -> None:
        self._pool = pool
        self._block_size = block_size
        self._sums = np.zeros(pool.shape.num_blocks, dtype=np.uint64)
        self._generations = np.zeros(pool.shape.num_blocks, dtype=np.uint64)
        """With which a full block had its sum; 0: none is known."""

    def of(self, blocks: GroupBlocks, sealed: OfferSealed) -> list[int] | None:
        """Return the sums of an offer's blocks of one group; None where one is not known and was not computed just now."""
        ids = np.asarray(blocks.block_ids, dtype=np.int64)
        generations = np.asarray(blocks.generations, dtype=np.uint64)
        num_old, num_full = (
            max(0, min(num_tokens // self._block_size - blocks.first_block, len(ids)))
            for num_tokens in (sealed.num_reused, sealed.num_tokens)
        )
        if (self._generations[ids[:num_old]] != generations[:num_old]).any():
            return None
        self._sums[ids[num_old:]] = sum_blocks(self._pool.blocks, ids[num_old:])
        self._generations[ids[num_old:num_full]] = generations[num_old:num_full]
        self._generations[ids[num_full:]] = 0
        return [int(each) for each in self._sums[ids]]


class Notices:
    """Gives them and takes them. `summed`: the pool whose blocks' sums are told, `block_size` tokens in each; None: none are."""

    def __init__(self, links: Links, summed: KVPool | None, block_size: int) -> None:
        self.num_ahead = 0
        """Requests so far that went on before the server's word."""
        self._links = links
        self._sums = None if summed is None else _BlockSums(summed, block_size)
        self._most_blocks = 0 if summed is None else MAX_SUMMED_BYTES // summed.shape.block_bytes
        self._held: dict[str, AddRequest] = {}
        """By request id, those that wait for a notice."""
        self._ahead: set[str] = set()
        """Ids of those that run on one, until the server's word comes."""

    def give(self, sealed: list[OfferSealed], deltas: list[ChoiceDelta]) -> list[OfferSealed]:
        """Tell of the offers that somebody listens for and that go on; return the offers, with sums where they were made."""
        return [self._give(each, deltas) if self._links.is_awaited(each.offer_id) else each for each in sealed]

    def _give(self, sealed: OfferSealed, deltas: list[ChoiceDelta]) -> OfferSealed:
        told = [each for each in deltas if each.request_id == sealed.request_id and each.token_ids]
        num_blocks = sum(len(blocks.block_ids) for blocks in sealed.groups)
        if len(told) != 1 or told[0].finish_reason or sealed.grows:
            return sealed
        groups = sealed.groups
        if self._sums is not None:
            if num_blocks > self._most_blocks:
                return sealed
            sums = [each for blocks in groups if (each := self._sums.of(blocks, sealed)) is not None]
            if len(sums) < len(groups):
                return sealed
            sealed = msgspec.structs.replace(sealed, checksums=sums)
            groups = [
                msgspec.structs.replace(blocks, checksums=each) for blocks, each in zip(groups, sums, strict=True)
            ]
        self._links.tell(
            OfferNotice(
                offer_id=sealed.offer_id,
                groups=groups,
                num_tokens=sealed.num_tokens,
                digest=sealed.digest,
                first_tokens=told[0].token_ids,
                marks=sealed.marks,
            )
        )
        return sealed

    def hold(self, add: AddRequest) -> None:
        """Keep a request whose source names an offer, its owner and the transfer, and no blocks."""
        assert add.source is not None
        self._held[add.request.request_id] = add
        self._links.await_offer(add.source.peer_id, add.source.connector, add.source.offer_id)

    def take(self) -> list[AddRequest]:
        """Return the requests that peers' notices complete: they run ahead from now on."""
        return [add for peer_id, notice in self._links.take_notices() for add in self._completed(peer_id, notice)]

    def _completed(self, peer_id: str, notice: OfferNotice) -> list[AddRequest]:
        """One that does not fit what it was awaited for changes nothing: the servers find the words for that."""
        going = []
        for request_id, add in list(self._held.items()):
            source, request = add.source, add.request
            if source is None or (source.peer_id, source.offer_id) != (peer_id, notice.offer_id):
                continue
            del self._held[request_id]
            if notice.num_tokens != (num_tokens := len(request.token_ids)):
                log.debug("%s has %d tokens, the notice of its offer %d", request_id, num_tokens, notice.num_tokens)
                continue
            if notice.digest != add.digest:
                # Its owner will say so too, but by then others would have found the KV under the names of this prompt.
                log.debug("the notice of %s's offer is of another prompt", request_id)
                continue
            self._ahead.add(request_id)
            self.num_ahead += 1
            groups = notice.groups
            if self._sums is None:
                groups = [msgspec.structs.replace(blocks, checksums=[]) for blocks in groups]
            source = msgspec.structs.replace(source, groups=groups, num_tokens=notice.num_tokens, marks=notice.marks)
            request = msgspec.structs.replace(request, emitted=[notice.first_tokens])
            going.append(msgspec.structs.replace(add, request=request, source=source))
        return going

    def settle(self, request_id: str) -> bool:
        """The server's word on a request has come, or its end; whether it runs already."""
        self._held.pop(request_id, None)
        is_ahead = request_id in self._ahead
        self._ahead.discard(request_id)
        return is_ahead
