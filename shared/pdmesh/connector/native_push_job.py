"""A write that a native helper process has under way: own blocks, into those of a peer that expects them."""

import time
from collections import deque

import numpy as np

from pdmesh.connector.active import PullEnd
from pdmesh.connector.native_jobs import PIECE_BYTES, Copy, Memory, Peer, address_of, ranges
from pdmesh.connector.native_messages import FromHelper, PullEnded, StartPush
from pdmesh.connector.throttle import Throttle


class PushJob:
    """One write, in pieces, as one that is posted cannot be taken back. It compares nothing: who orders it holds its blocks
    meanwhile."""

    def __init__(self, write: Copy, memory: Memory, peer: Peer, message: StartPush, throttle: Throttle) -> None:
        self.peer = peer
        self.message = message
        self.reason = ""
        """Why it will end without success, when that is decided before its write has ended."""
        self.due_s = 0.0
        self.handle: int | None = None
        self._is_posting = False
        """Also when that has raised: a part may have been posted."""
        self._write = write
        self._memory = memory
        self._throttle = throttle
        self._deadline_s = time.monotonic() + message.deadline_s
        num, block_bytes = len(message.source_block_ids), memory.shape.block_bytes
        most = throttle.piece_blocks(block_bytes, PIECE_BYTES)
        self._pieces = deque(slice(begin, begin + most) for begin in range(0, num, most))
        self._next_piece()

    def on_due(self) -> FromHelper | None:
        if (ended := self._interrupted()) is not None:
            return ended
        if time.monotonic() >= self.due_s:
            self._write_piece()
        return None

    def on_done(self) -> FromHelper | None:
        self.handle = None
        if (ended := self._interrupted()) is not None:
            return ended
        if not self._pieces:
            return self._ended("")
        self._next_piece()
        return None

    def on_lost(self) -> FromHelper:
        # What was handed to the network may arrive, however the connection ended at this side.
        return self._ended(self.reason or PullEnd.PEER_LOST, may_write=self.handle is not None or self._is_posting)

    def _interrupted(self) -> FromHelper | None:
        if not self.reason and time.monotonic() > self._deadline_s:
            self.reason = PullEnd.TIMEOUT
        return self._ended(self.reason) if self.reason else None

    def _next_piece(self) -> None:
        """Book the first piece that is left, and begin to write it unless it has to wait."""
        num_bytes = len(self.message.source_block_ids[self._pieces[0]]) * self._memory.shape.block_bytes
        self.due_s = min(self._throttle.book(num_bytes), self._deadline_s)
        if not self.due_s:
            self._write_piece()

    def _write_piece(self) -> None:
        piece, block_bytes, peer = self._pieces.popleft(), self._memory.shape.block_bytes, self.peer.message
        sources = np.asarray(self.message.source_block_ids[piece], dtype=np.uint64)
        targets = np.asarray(self.message.target_block_ids[piece], dtype=np.uint64)
        local = sources * np.uint64(block_bytes) + np.uint64(address_of(self._memory.pool.blocks))
        remote = targets * np.uint64(block_bytes) + np.uint64(peer.base + peer.header_bytes)
        self._is_posting = True
        self.handle = self._write(ranges(local, block_bytes), ranges(remote, block_bytes), self.peer)
        self._is_posting = False

    def _ended(self, reason: str, *, may_write: bool = False) -> PullEnded:
        num_bytes = 0 if reason else len(self.message.source_block_ids) * self._memory.shape.block_bytes
        return PullEnded(transfer_id=self.message.transfer_id, reason=reason, num_bytes=num_bytes, may_write=may_write)
