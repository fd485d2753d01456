"""What a native helper process has registered, and the reads it has under way: handshakes' proofs and pulls.

A pull is a READ of the blocks (several, with a pause before each, where a throttle is set), then a READ of their generation
words, then a comparison.
"""

import mmap
import secrets
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from enum import Enum
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from pdmesh.connector.active import PullEnd, are_as_told
from pdmesh.connector.native_agent import Ranges
from pdmesh.connector.native_messages import AgentConnected, ConnectAgent, FromHelper, PullEnded, StartPull
from pdmesh.connector.pool import KVPool, PoolShape, PullTarget
from pdmesh.connector.staging import NUM_LANES, Lane, StagingArea
from pdmesh.connector.throttle import Throttle
from pdmesh.protocol.layout import MAX_LANE_BLOCKS
from pdmesh_kernels.block_sum import sum_blocks

PROOF_BYTES = 32
# A slot is used again only after this many further handshakes, when a late read into it has long ended.
NUM_PROOF_SLOTS = 64
CONNECT_TIMEOUT_S = 3.0
WORD_BYTES = 8
# Read at once where blocks are summed as they arrive: summing 8 MiB takes half a millisecond.
PIECE_BYTES = 8 << 20
# Read at once where nothing is done between: what is cancelled has a second to end in, or costs all others their helper.
UNCHECKED_PIECE_BYTES = 64 << 20


class Memory:
    """All that is registered: the pool, and a private page run with received words, received proofs and the own proof."""

    def __init__(self, pool_fd: int, shape: PoolShape, staging: StagingArea | None = None) -> None:
        self.shape = shape
        self.pool = KVPool(pool_fd, shape, writable=True)
        self.pool.staging = staging
        self.base = address_of(self.pool.generations)
        num_proof_bytes = (NUM_PROOF_SLOTS + 1) * PROOF_BYTES
        num_words = shape.num_blocks + (0 if staging is None else NUM_LANES * MAX_LANE_BLOCKS)
        self.scratch_bytes = num_words * WORD_BYTES + num_proof_bytes
        scratch = mmap.mmap(-1, self.scratch_bytes)
        self.words: NDArray[np.uint64] = np.frombuffer(scratch, dtype="<u8", count=num_words)
        """Generation words as read, indexed by target block, behind the pool's the lanes': no two pulls share one."""
        self.proofs = np.frombuffer(scratch, dtype=np.uint8, offset=num_words * WORD_BYTES)
        self.proofs = self.proofs.reshape(NUM_PROOF_SLOTS + 1, PROOF_BYTES)
        self.own_proof = secrets.token_bytes(PROOF_BYTES)
        self.proofs[-1] = np.frombuffer(self.own_proof, dtype=np.uint8)
        self.sums_thread = ThreadPoolExecutor(1, thread_name_prefix="sums")
        """Sums what has arrived."""

    @property
    def staging_address(self) -> int:
        assert self.pool.staging is not None
        return address_of(self.pool.staging.bytes)

    def place(self, message: StartPull) -> "Place":
        """Return where a pull's blocks and words go."""
        if message.lane < 0:
            target = self.pool.target(None)
            return Place(target, address_of(target.blocks), 0)
        lane = Lane(message.lane, message.lane_block_bytes)
        target = self.pool.target(lane)
        return Place(target, address_of(target.blocks), self.shape.num_blocks + lane.first_word)

    @property
    def scratch_address(self) -> int:
        return address_of(self.words)

    def proof_address(self, slot: int) -> int:
        """Address of a proof slot; -1 is the own proof."""
        return address_of(self.proofs[slot])


@dataclass(slots=True)
class Peer:
    """A peer whose metadata is loaded."""

    name: str
    message: ConnectAgent


@dataclass(frozen=True, slots=True)
class Place:
    """Where a pull's blocks go, and their generation words."""

    target: PullTarget
    address: int
    """Of the first block that could be named."""
    first_word: int
    """Place of its word."""


class _Stage(Enum):
    DATA = "data"
    WORDS = "words"


Copy = Callable[[Ranges, Ranges, Peer], int]
"""Begins a read of remote ranges (the second) into local ones, or a write the other way, and returns its handle."""


class Job(Protocol):
    """A copy under way and what comes of it."""

    peer: Peer
    handle: int | None
    """Of the read under way; None while it waits for `due_s`."""
    due_s: float

    def on_due(self) -> "FromHelper | None":
        """Asked from time to time while no read is under way: begin the next when its time has come, or answer."""

    def on_done(self) -> "FromHelper | None":
        """The read has ended well: answer, or begin the next read and return None."""

    def on_lost(self) -> FromHelper:
        """The peer is gone."""


class ProofJob:
    """The handshake: read a secret of the peer's memory, to know that it is reached and that it is the right one."""

    def __init__(self, read: Copy, memory: Memory, peer: Peer, slot: int) -> None:
        self.peer = peer
        self.deadline_s = time.monotonic() + CONNECT_TIMEOUT_S
        self._received = memory.proofs[slot]
        self._received[:] = 0
        local = ranges([memory.proof_address(slot)], PROOF_BYTES)
        remote = ranges([peer.message.proof_address], PROOF_BYTES)
        self.handle: int | None = read(local, remote, peer)
        self.due_s = 0.0

    def on_due(self) -> None:
        """A proof is read at once."""

    def on_done(self) -> FromHelper:
        matches = self._received.tobytes() == self.peer.message.proof
        error = "" if matches else "its memory holds something else than it says"
        return AgentConnected(peer_id=self.peer.message.peer_id, order=self.peer.message.order, error=error)

    def on_lost(self) -> FromHelper:
        return AgentConnected(
            peer_id=self.peer.message.peer_id,
            order=self.peer.message.order,
            error="its memory cannot be read from here",
        )


class PullJob:
    """One pull: blocks, then words, then the comparison. The blocks that have arrived are summed while the next are read."""

    def __init__(self, read: Copy, memory: Memory, peer: Peer, message: StartPull, throttle: Throttle) -> None:
        self.peer = peer
        self.message = message
        self.reason = ""
        """Why it will end without success, when that is decided before its read has ended."""
        self._read = read
        self._memory = memory
        self._deadline_s = time.monotonic() + message.deadline_s
        self._stage = _Stage.DATA
        self._throttle = throttle
        self._place = memory.place(message)
        self._wanted = np.asarray(message.checksums, dtype=np.uint64)
        self._pieces = self._split()
        self._piece = slice(0)
        """What is being read."""
        self._checks: list[Future[bool]] = []
        """Of what has arrived: whether it is what the owner summed."""
        self.due_s = 0.0
        self.handle: int | None = None
        self._next_piece()

    def on_due(self) -> FromHelper | None:
        if not self.reason and time.monotonic() > self._deadline_s:
            self.reason = PullEnd.TIMEOUT
        if self.reason:
            return self._ended(self.reason)
        if time.monotonic() >= self.due_s:
            self._read_piece()
        return None

    def on_done(self) -> FromHelper | None:
        if not self.reason and time.monotonic() > self._deadline_s:
            self.reason = PullEnd.TIMEOUT
        if self.reason:
            return self._ended(self.reason)
        if self._stage is _Stage.DATA:
            if self._wanted.size:
                # Beside the next read: a transport may copy in the very thread that asks for it, as UCX does within a host.
                self._checks.append(self._memory.sums_thread.submit(self._check, self._piece))
            if self._pieces:
                self._next_piece()
            else:
                self._stage = _Stage.WORDS
                self._read_words()
            return None
        received = self._memory.words[self._words]
        if [int(word) for word in received] != self.message.generations:
            return self._ended(PullEnd.STALE)
        # All but the last have ended by now: summing is faster than reading.
        return self._ended("" if all(check.result() for check in self._checks) else PullEnd.CORRUPT)

    def on_lost(self) -> FromHelper:
        return self._ended(self.reason or PullEnd.PEER_LOST)

    def _split(self) -> deque[slice]:
        """Places in the block lists that are read at once."""
        num = len(self.message.target_block_ids)
        block_bytes = self._place.target.shape.block_bytes
        most = self._throttle.piece_blocks(block_bytes, PIECE_BYTES if self._wanted.size else UNCHECKED_PIECE_BYTES)
        return deque(slice(begin, begin + most) for begin in range(0, num, most))

    def _next_piece(self) -> None:
        """Book the first piece that is left, and begin to read it unless it has to wait."""
        piece = self._pieces[0]
        num_bytes = len(self.message.target_block_ids[piece]) * self._place.target.shape.block_bytes
        self.handle = None
        self.due_s = min(self._throttle.book(num_bytes), self._deadline_s)
        if not self.due_s:
            self._read_piece()

    def _read_piece(self) -> None:
        piece, peer = self._pieces.popleft(), self.peer.message
        self._piece = piece
        block_bytes = self._place.target.shape.block_bytes
        targets = np.asarray(self.message.target_block_ids[piece], dtype=np.uint64)
        sources = np.asarray(self.message.source_block_ids[piece], dtype=np.uint64)
        local = targets * np.uint64(block_bytes) + np.uint64(self._place.address)
        remote = sources * np.uint64(block_bytes) + np.uint64(peer.base + peer.header_bytes)
        self.handle = self._read(ranges(local, block_bytes), ranges(remote, block_bytes), self.peer)

    @property
    def _words(self) -> NDArray[np.uint64]:
        """Places of its blocks' words among those received."""
        return np.asarray(self.message.target_block_ids, dtype=np.uint64) + np.uint64(self._place.first_word)

    def _check(self, piece: slice) -> bool:
        """Sum what has arrived; in the thread for that."""
        sums = sum_blocks(self._place.target.blocks, self.message.target_block_ids[piece])
        return are_as_told(sums, self._wanted[piece])

    def _read_words(self) -> None:
        sources = np.asarray(self.message.source_block_ids, dtype=np.uint64)
        local = self._words * np.uint64(WORD_BYTES) + np.uint64(self._memory.scratch_address)
        remote = sources * np.uint64(WORD_BYTES) + np.uint64(self.peer.message.base)
        self.handle = self._read(ranges(local, WORD_BYTES), ranges(remote, WORD_BYTES), self.peer)

    def _ended(self, reason: str) -> PullEnded:
        num_bytes = 0 if reason else len(self.message.source_block_ids) * self._place.target.shape.block_bytes
        return PullEnded(transfer_id=self.message.transfer_id, reason=reason, num_bytes=num_bytes)


def ranges(addresses: "NDArray[np.uint64] | list[int]", num_bytes: int) -> Ranges:
    """Pieces of one length at these addresses."""
    ranges = np.zeros((len(addresses), 3), dtype=np.uint64)
    ranges[:, 0] = addresses
    ranges[:, 1] = num_bytes
    return ranges


def address_of(array: "NDArray[np.uint64] | NDArray[np.uint8]") -> int:
    """Where an array is in this process."""
    return int(array.ctypes.data)
