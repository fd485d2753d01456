"""What a native helper process has registered, and the reads it has under way: handshakes' proofs and pulls.

A pull is a READ of the blocks (several, with a pause before each, where a throttle is set), then a READ of their generation
words, then a comparison.
"""

import itertools
import mmap
import secrets
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from pdmesh.connector.active import PullEnd
from pdmesh.connector.native_agent import Arrived, Ranges
from pdmesh.connector.native_messages import AgentConnected, ConnectAgent, FromHelper, PullEnded, StartPull
from pdmesh.connector.native_sums import ArrivingBlocks, SumsThread
from pdmesh.connector.pool import KVPool, PoolShape, PullTarget
from pdmesh.connector.staging import NUM_LANES, Lane, StagingArea
from pdmesh.connector.throttle import Throttle
from pdmesh.protocol.layout import MAX_LANE_BLOCKS

PROOF_BYTES = 32
# A slot is used again only after this many further handshakes, when a late read into it has long ended.
NUM_PROOF_SLOTS = 64
CONNECT_TIMEOUT_S = 3.0
WORD_BYTES = 8
# Moved at once where blocks are summed as they arrive: of half as much, what is done between two reads would be seen.
PIECE_BYTES = 16 << 20
# Read at once where nothing is done behind it: what is cancelled has a second to end in, or costs all others their helper.
LARGE_PIECE_BYTES = 64 << 20
# A piece that takes about as long as what has to be done for one more: half a millisecond.
LEAST_PIECE_BYTES = 2 << 20


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
        self.sums_thread = SumsThread()

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
    VERDICT = "verdict"
    """All is read, and what has arrived last is being summed."""


Copy = Callable[[Ranges, Ranges, Peer], int]
"""Begins a read of remote ranges (the second) into local ones, or a write the other way, and returns its handle."""
ReadInSteps = Callable[[Ranges, Ranges, Peer, Arrived], int]
"""A read that tells of what is there before it returns (`SteppingAgent`)."""


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
    """One pull: blocks, then words, then the comparison. Blocks are summed by who copies them where the transport reads in
    steps, else while the next are read."""

    def __init__(
        self,
        read: Copy,
        memory: Memory,
        peer: Peer,
        message: StartPull,
        throttle: Throttle,
        in_steps: ReadInSteps | None = None,
    ) -> None:
        self.peer = peer
        self.message = message
        self.reason = ""
        """Why it will end without success, when that is decided before its read has ended."""
        self._read = read
        self._in_steps = in_steps
        self._memory = memory
        self._deadline_s = time.monotonic() + message.deadline_s
        self._stage = _Stage.DATA
        self._throttle = throttle
        place = memory.place(message)
        blocks = place.target.blocks
        self._block_bytes = blocks.shape[1]
        sources = np.asarray(message.source_block_ids, dtype=np.uint64)
        targets = np.asarray(message.target_block_ids, dtype=np.uint64)
        # All at once: what is left to do between two reads is time in which nothing is copied.
        size, first = np.uint64(self._block_bytes), np.uint64(peer.message.base + peer.message.header_bytes)
        self._local = ranges(targets * size + np.uint64(place.address), self._block_bytes)
        self._remote = ranges(sources * size + first, self._block_bytes)
        self._first_word = place.first_word
        self._arriving = ArrivingBlocks(memory.sums_thread, blocks, targets.view(np.int64), message.checksums)
        self._pieces = self._split()
        self._piece = slice(0)
        """What is being read."""
        self.due_s = 0.0
        self.handle: int | None = None
        self._next_piece()

    def on_due(self) -> FromHelper | None:
        if not self.reason and time.monotonic() > self._deadline_s:
            self.reason = PullEnd.TIMEOUT
        if self.reason:
            return self._ended(self.reason)
        if self._stage is _Stage.VERDICT:
            return self._judged()
        if time.monotonic() >= self.due_s:
            self._read_piece()
        return None

    def on_done(self) -> FromHelper | None:
        if not self.reason and time.monotonic() > self._deadline_s:
            self.reason = PullEnd.TIMEOUT
        if self.reason:
            return self._ended(self.reason)
        if self._stage is _Stage.DATA:
            # Beside the next read: a transport may copy in the very thread that asks for it, as UCX does within a host.
            if not self._arriving.is_summed_here(self._piece):
                self._arriving.note(self._piece.stop)
            if self._pieces:
                self._next_piece()
            else:
                self._arriving.finish()
                self._stage = _Stage.WORDS
                self._read_words()
            return None
        words = self._memory.words[self._first_word :]
        if words[self.message.target_block_ids].tolist() != self.message.generations:
            return self._ended(PullEnd.STALE)
        # Never waited for here: others are read, cancelled and proved by this thread, and what they sum may come before.
        self._stage, self.handle, self.due_s = _Stage.VERDICT, None, self._deadline_s
        return self._judged()

    def on_lost(self) -> FromHelper:
        return self._ended(self.reason or PullEnd.PEER_LOST)

    def _judged(self) -> FromHelper | None:
        """End with what the sums say, once they do. All but the last have been summed by now: that is faster than reading."""
        if self._arriving.verdict is None:
            return None
        return self._ended("" if self._arriving.verdict else PullEnd.CORRUPT)

    def _split(self) -> deque[slice]:
        """Places in the block lists that are read at once.

        Where they are summed behind the reads, at most three quarters of what is left, as summing is some four times as fast as
        reading: so hardly anything is left to sum when the last has come.
        """
        num, is_summed_behind = len(self._local), self._arriving.is_checked and self._in_steps is None
        most = self._throttle.piece_blocks(self._block_bytes, PIECE_BYTES if is_summed_behind else LARGE_PIECE_BYTES)
        least = max(1, LEAST_PIECE_BYTES // self._block_bytes)
        pieces: deque[slice] = deque()
        begin = 0
        while begin < num:
            end = min(num, begin + (min(most, max(least, (num - begin) * 3 // 4)) if is_summed_behind else most))
            pieces.append(slice(begin, end))
            begin = end
        return pieces

    def _next_piece(self) -> None:
        """Book the first piece that is left, and begin to read it unless it has to wait."""
        self.handle = None
        piece = self._pieces[0]
        self.due_s = min(self._throttle.book((piece.stop - piece.start) * self._block_bytes), self._deadline_s)
        if not self.due_s:
            self._read_piece()

    def _read_piece(self) -> None:
        self._piece = self._pieces.popleft()
        local, remote, first = self._local[self._piece], self._remote[self._piece], self._piece.start
        if self._in_steps is None:
            self.handle = self._read(local, remote, self.peer)
        else:
            self.handle = self._in_steps(
                local, remote, self.peer, lambda begin, end: self._arriving.sum_here(first + begin, first + end)
            )

    def _read_words(self) -> None:
        """Neighbours in one range: each range of 8 bytes takes 2 µs."""
        local, base = self._memory.scratch_address + self._first_word * WORD_BYTES, self.peer.message.base
        sources, targets = self.message.source_block_ids, self.message.target_block_ids
        runs = _runs(sources, targets)
        num_bytes = [(run.stop - run.start) * WORD_BYTES for run in runs]
        self.handle = self._read(
            ranges([local + targets[run.start] * WORD_BYTES for run in runs], num_bytes),
            ranges([base + sources[run.start] * WORD_BYTES for run in runs], num_bytes),
            self.peer,
        )

    def _ended(self, reason: str) -> PullEnded:
        self._arriving.abandon()
        num_bytes = 0 if reason else len(self._local) * self._block_bytes
        return PullEnded(transfer_id=self.message.transfer_id, reason=reason, num_bytes=num_bytes)


def _runs(one: list[int], other: list[int]) -> list[slice]:
    """Where numbers follow each other in both lists."""
    begins = [0]
    for at in range(1, len(one)):
        if one[at] - one[at - 1] != 1 or other[at] - other[at - 1] != 1:
            begins.append(at)
    return [slice(begin, end) for begin, end in itertools.pairwise([*begins, len(one)])]


def ranges(addresses: "NDArray[np.uint64] | list[int]", num_bytes: int | list[int]) -> Ranges:
    """Pieces of memory at these addresses, all of one length or each of its own."""
    ranges = np.zeros((len(addresses), 3), dtype=np.uint64)
    ranges[:, 0] = addresses
    ranges[:, 1] = num_bytes
    return ranges


def address_of(array: "NDArray[np.uint64] | NDArray[np.uint8]") -> int:
    """Where an array is in this process."""
    return int(array.ctypes.data)
