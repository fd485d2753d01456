"""The NIXL helper process: an agent over the engine's pool, so that a crash in native code fails transfers and not the engine.

`python -m pdmesh.connector.nixl_process SOCKET_FD POOL_FD PARENT_PID`. It sleeps on its socket, looks at NIXL every
fraction of a millisecond only while reads run, and ends with its parent. A pull is a READ of the blocks, then a READ of
their generation words, then a comparison. A read that was posted cannot be taken back: a cancelled pull ends when NIXL says
that its read has, and the engine kills this process when that takes too long.
"""

import mmap
import os
import secrets
import select
import signal
import socket
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from pdmesh.connector.active import PullEnd, error_reason
from pdmesh.connector.nixl_agent import NixlAgent, ReadState
from pdmesh.connector.nixl_messages import (
    AgentConnected,
    CancelPull,
    ConnectAgent,
    DisconnectAgent,
    Frames,
    FromHelper,
    HelperFailed,
    HelperReady,
    PullEnded,
    Setup,
    StartPull,
    ToHelper,
    frame,
    to_helper_decoder,
)
from pdmesh.connector.pool import KVPool, PoolShape
from pdmesh.parent import die_with_parent

ArgumentT = TypeVar("ArgumentT")

POLL_S = 0.0002
PROOF_BYTES = 32
# A slot is used again only after this many further handshakes, when a late read into it has long ended.
NUM_PROOF_SLOTS = 64
CONNECT_TIMEOUT_S = 3.0
WORD_BYTES = 8


class Memory:
    """All that is registered: the pool, and a private page run with received words, received proofs and the own proof."""

    def __init__(self, pool_fd: int, shape: PoolShape) -> None:
        self.shape = shape
        self.pool = KVPool(pool_fd, shape, writable=True)
        self.base = _address(self.pool.generations)
        num_proof_bytes = (NUM_PROOF_SLOTS + 1) * PROOF_BYTES
        self.scratch_bytes = shape.num_blocks * WORD_BYTES + num_proof_bytes
        scratch = mmap.mmap(-1, self.scratch_bytes)
        self.words: NDArray[np.uint64] = np.frombuffer(scratch, dtype="<u8", count=shape.num_blocks)
        """Generation words as read, indexed by target block: two pulls never have one in common."""
        self.proofs = np.frombuffer(scratch, dtype=np.uint8, offset=shape.num_blocks * WORD_BYTES)
        self.proofs = self.proofs.reshape(NUM_PROOF_SLOTS + 1, PROOF_BYTES)
        self.own_proof = secrets.token_bytes(PROOF_BYTES)
        self.proofs[-1] = np.frombuffer(self.own_proof, dtype=np.uint8)

    @property
    def scratch_address(self) -> int:
        return _address(self.words)

    def proof_address(self, slot: int) -> int:
        """Address of a proof slot; -1 is the own proof."""
        return _address(self.proofs[slot])


@dataclass(slots=True)
class _Agent:
    """A peer whose metadata is loaded."""

    name: str
    message: ConnectAgent


class _Stage(Enum):
    DATA = "data"
    WORDS = "words"


class _Job(Protocol):
    """A read under way and what comes of it."""

    peer: _Agent
    handle: int

    def on_done(self) -> "FromHelper | None":
        """The read has ended well: answer, or begin the next read and return None."""

    def on_lost(self) -> FromHelper:
        """The peer is gone."""


class Helper:
    """Carries out the engine's orders. Single-threaded."""

    def __init__(self, agent: NixlAgent, memory: Memory) -> None:
        self.agent = agent
        self.memory = memory
        self._agents: dict[str, _Agent] = {}
        self._jobs: list[_Job] = []
        self._num_handshakes = 0

    @property
    def busy(self) -> bool:
        return bool(self._jobs)

    def handle(self, message: ToHelper) -> list[FromHelper]:
        """Carry out one order; answers that are ready at once."""
        match message:
            case ConnectAgent():
                return [*self._drop(message.peer_id), *self._connect(message)]
            case DisconnectAgent():
                return self._drop(message.peer_id)
            case StartPull():
                return self._start(message)
            case CancelPull():
                for job in self._jobs:
                    if isinstance(job, _PullJob) and job.message.transfer_id == message.transfer_id:
                        job.reason = job.reason or PullEnd.CANCELLED
        return []

    def poll(self) -> list[FromHelper]:
        """See which reads have ended."""
        answers: list[FromHelper] = []
        for job in list(self._jobs):
            # One that failed takes all of its peer's with it.
            if job in self._jobs:
                answers += self._advance(job)
        return answers

    def read(self, local: NDArray[np.uint64], remote: NDArray[np.uint64], peer: _Agent) -> int:
        return self.agent.read(local, remote, peer.name)

    def _connect(self, message: ConnectAgent) -> list[FromHelper]:
        try:
            peer = _Agent(self.agent.add_peer(message.agent), message)
            self._agents[message.peer_id] = peer
            slot = self._num_handshakes % NUM_PROOF_SLOTS
            self._num_handshakes += 1
            self._jobs.append(_ProofJob(self, peer, slot))
        except Exception as exc:  # any of the bindings' classes
            self._drop(message.peer_id)
            return [AgentConnected(peer_id=message.peer_id, error=str(exc))]
        return []

    def _start(self, message: StartPull) -> list[FromHelper]:
        peer = self._agents.get(message.peer_id)
        if peer is None:
            return [PullEnded(transfer_id=message.transfer_id, reason=PullEnd.PEER_LOST, num_bytes=0)]
        try:
            self._jobs.append(_PullJob(self, peer, message))
        except Exception as exc:  # any of the bindings' classes
            ended = PullEnded(transfer_id=message.transfer_id, reason=error_reason(exc), num_bytes=0)
            return [ended, *self._drop(message.peer_id)]
        return []

    def _advance(self, job: _Job) -> list[FromHelper]:
        state = self.agent.state(job.handle)
        if state is ReadState.RUNNING:
            overdue = isinstance(job, _ProofJob) and time.monotonic() > job.deadline_s
            return self._drop(job.peer.message.peer_id) if overdue else []
        if state is ReadState.FAILED:
            return self._drop(job.peer.message.peer_id)
        self.agent.release(job.handle)
        try:
            answer = job.on_done()
        except Exception:  # any of the bindings' classes, from beginning the next read
            self._jobs.remove(job)
            return [job.on_lost(), *self._drop(job.peer.message.peer_id)]
        if answer is None:
            return []
        self._jobs.remove(job)
        refused = isinstance(answer, AgentConnected) and answer.error
        return [answer, *self._drop(job.peer.message.peer_id)] if refused else [answer]

    def _drop(self, peer_id: str) -> list[FromHelper]:
        """Close the connection to a peer, which ends its reads, and say so of each."""
        peer = self._agents.pop(peer_id, None)
        if peer is None:
            return []
        lost = [job for job in self._jobs if job.peer is peer]
        self._jobs = [job for job in self._jobs if job.peer is not peer]
        for job in lost:
            _quietly(self.agent.release, job.handle)
        _quietly(self.agent.remove_peer, peer.name)
        return [job.on_lost() for job in lost]


class _ProofJob:
    """The handshake: read a secret of the peer's memory, to know that it is reached and that it is the right one."""

    def __init__(self, helper: Helper, peer: _Agent, slot: int) -> None:
        self.peer = peer
        self.deadline_s = time.monotonic() + CONNECT_TIMEOUT_S
        self._received = helper.memory.proofs[slot]
        self._received[:] = 0
        local = _ranges([helper.memory.proof_address(slot)], PROOF_BYTES)
        remote = _ranges([peer.message.proof_address], PROOF_BYTES)
        self.handle = helper.read(local, remote, peer)

    def on_done(self) -> FromHelper:
        matches = self._received.tobytes() == self.peer.message.proof
        error = "" if matches else "its memory holds something else than it says"
        return AgentConnected(peer_id=self.peer.message.peer_id, error=error)

    def on_lost(self) -> FromHelper:
        return AgentConnected(peer_id=self.peer.message.peer_id, error="its memory cannot be read from here")


class _PullJob:
    """One pull: blocks, then words, then the comparison."""

    def __init__(self, helper: Helper, peer: _Agent, message: StartPull) -> None:
        self.peer = peer
        self.message = message
        self.reason = ""
        """Why it will end without success, when that is decided before its read has ended."""
        self._helper = helper
        self._deadline_s = time.monotonic() + message.deadline_s
        self._stage = _Stage.DATA
        memory, block_bytes = helper.memory, helper.memory.shape.block_bytes
        targets = np.asarray(message.target_block_ids, dtype=np.uint64)
        sources = np.asarray(message.source_block_ids, dtype=np.uint64)
        local = targets * np.uint64(block_bytes) + np.uint64(memory.base + memory.shape.header_bytes)
        remote = sources * np.uint64(block_bytes) + np.uint64(peer.message.base + peer.message.header_bytes)
        self.handle = helper.read(_ranges(local, block_bytes), _ranges(remote, block_bytes), peer)

    def on_done(self) -> FromHelper | None:
        if not self.reason and time.monotonic() > self._deadline_s:
            self.reason = PullEnd.TIMEOUT
        if self.reason:
            return self._ended(self.reason)
        if self._stage is _Stage.DATA:
            self._stage = _Stage.WORDS
            self._read_words()
            return None
        received = self._helper.memory.words[self.message.target_block_ids]
        return self._ended("" if [int(word) for word in received] == self.message.generations else PullEnd.STALE)

    def on_lost(self) -> FromHelper:
        return self._ended(self.reason or PullEnd.PEER_LOST)

    def _read_words(self) -> None:
        targets = np.asarray(self.message.target_block_ids, dtype=np.uint64)
        sources = np.asarray(self.message.source_block_ids, dtype=np.uint64)
        local = targets * np.uint64(WORD_BYTES) + np.uint64(self._helper.memory.scratch_address)
        remote = sources * np.uint64(WORD_BYTES) + np.uint64(self.peer.message.base)
        self.handle = self._helper.read(_ranges(local, WORD_BYTES), _ranges(remote, WORD_BYTES), self.peer)

    def _ended(self, reason: str) -> PullEnded:
        num_bytes = 0 if reason else len(self.message.source_block_ids) * self._helper.memory.shape.block_bytes
        return PullEnded(transfer_id=self.message.transfer_id, reason=reason, num_bytes=num_bytes)


def _ranges(addresses: "NDArray[np.uint64] | list[int]", num_bytes: int) -> NDArray[np.uint64]:
    """[n, 3] of (address, bytes, device), as NIXL wants descriptors."""
    ranges = np.zeros((len(addresses), 3), dtype=np.uint64)
    ranges[:, 0] = addresses
    ranges[:, 1] = num_bytes
    return ranges


def _address(array: "NDArray[np.uint64] | NDArray[np.uint8]") -> int:
    return int(array.ctypes.data)


def _quietly(call: Callable[[ArgumentT], None], argument: ArgumentT) -> None:
    try:
        call(argument)
    except Exception:  # of a peer that is gone anyway
        return


def main() -> None:
    """Serve one engine until it closes the socket."""
    socket_fd, pool_fd, parent_pid = (int(argument) for argument in sys.argv[1:4])
    die_with_parent(parent_pid)
    # Ctrl-C reaches the whole process group; the engine decides when this process ends.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    connection = socket.socket(fileno=socket_fd)
    frames = Frames()
    helper: Helper | None = None
    while True:
        answers: list[FromHelper] = []
        readable, _, _ = select.select([connection], [], [], POLL_S if helper is not None and helper.busy else None)
        if readable:
            data = connection.recv(1 << 16)
            if not data:
                # Without destructors: NIXL's may wait for peers that are gone.
                os._exit(0)
            for body in frames.feed(data):
                message = to_helper_decoder.decode(body)
                if isinstance(message, Setup):
                    helper = _set_up(connection, message, pool_fd)
                elif helper is not None:
                    answers += helper.handle(message)
        if helper is not None:
            answers += helper.poll()
        if answers:
            connection.sendall(b"".join(frame(answer) for answer in answers))


def _set_up(connection: socket.socket, message: Setup, pool_fd: int) -> Helper:
    try:
        memory = Memory(pool_fd, PoolShape(message.num_blocks, message.block_bytes))
        agent = NixlAgent(message.agent_name)
        agent.register(memory.base, memory.shape.total_bytes)
        agent.register(memory.scratch_address, memory.scratch_bytes)
    except Exception as exc:  # the process's top: the engine decides what to do without NIXL
        connection.sendall(frame(HelperFailed(message=str(exc))))
        os._exit(1)
    ready = HelperReady(
        agent=agent.metadata(), base=memory.base, proof_address=memory.proof_address(-1), proof=memory.own_proof
    )
    connection.sendall(frame(ready))
    return Helper(agent, memory)


if __name__ == "__main__":
    main()
