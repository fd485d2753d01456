"""A native helper process: an agent over the engine's pool, so that a crash in native code fails transfers and not the engine.

Started tied to the engine (`pdmesh.parent`), with SOCKET_FD, GRAVE_FD, POOL_FD and, if there is one, STAGING_FD as arguments.
It sleeps on its socket, looks at its agent every fraction of a millisecond only while copies run, and ends with its parent. A
copy that was posted cannot be taken back: a cancelled pull ends when the agent says that its read has, and the engine kills
this process when that takes too long.
"""

import functools
import mmap
import os
import select
import signal
import socket
import sys
import time
from collections.abc import Callable
from typing import TypeVar

import msgspec

from pdmesh.connector.active import PullEnd, error_reason
from pdmesh.connector.native_agent import (
    AgentSettings,
    Arrived,
    CopyState,
    NativeAgent,
    NothingPosted,
    Ranges,
    SteppingAgent,
    WritingAgent,
    make_agent,
)
from pdmesh.connector.native_jobs import NUM_PROOF_SLOTS, Job, Memory, Peer, ProofJob, PullJob
from pdmesh.connector.native_messages import (
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
    StartPush,
    ToHelper,
    frame,
    to_helper_decoder,
)
from pdmesh.connector.native_push_job import PushJob
from pdmesh.connector.pool import PoolShape
from pdmesh.connector.staging import StagingArea
from pdmesh.connector.throttle import Throttle

ArgumentT = TypeVar("ArgumentT")

POLL_S = 0.0002
SWITCH_INTERVAL_S = 0.0002


class PartlyPosted(Exception):
    """A copy could not be begun whole, and a part of it may run."""


class Helper:
    """Carries out the engine's orders. Single-threaded."""

    def __init__(self, agent: NativeAgent, memory: Memory, throttle: Throttle) -> None:
        self._agent = agent
        self._memory = memory
        self._throttle = throttle
        self._agents: dict[str, Peer] = {}
        self._jobs: list[Job] = []
        self._num_handshakes = 0
        self._abandoned: list[int] = []
        """Proofs' reads that ran when their peer was given up: freed once they have ended."""
        self._has_moved = False
        """Whether a job went on at the last look: its next read may have ended already."""

    @property
    def patience_s(self) -> float | None:
        """How long nothing has to be looked at; None while there is nothing."""
        if not self._jobs:
            return None
        if self._has_moved:
            return 0.0
        if any(job.handle is not None for job in self._jobs):
            return POLL_S
        return max(POLL_S, min(job.due_s for job in self._jobs) - time.monotonic())

    def fileno(self) -> int:
        """What becomes readable when `poll` has something to look at before `patience_s` is over."""
        return self._memory.sums_thread.fileno()

    def handle(self, message: ToHelper) -> list[FromHelper]:
        """Carry out one order; answers that are ready at once."""
        match message:
            case ConnectAgent():
                return [*self._drop(message.peer_id), *self._connect(message)]
            case DisconnectAgent():
                return self._drop(message.peer_id)
            case StartPull() | StartPush():
                return self._start(message)
            case CancelPull():
                for job in self._jobs:
                    if isinstance(job, PullJob | PushJob) and job.message.transfer_id == message.transfer_id:
                        job.reason = job.reason or PullEnd.CANCELLED
        return []

    def poll(self) -> list[FromHelper]:
        """See which reads have ended."""
        answers: list[FromHelper] = []
        self._has_moved = False
        self._memory.sums_thread.drain()
        for job in list(self._jobs):
            # One that failed takes all of its peer's with it.
            if job in self._jobs:
                answers += self._advance(job)
        return answers

    def _read(self, local: Ranges, remote: Ranges, peer: Peer) -> int:
        return _begun(self._agent.read, local, remote, peer)

    def _read_in_steps(self, local: Ranges, remote: Ranges, peer: Peer, arrived: Arrived) -> int:
        assert isinstance(self._agent, SteppingAgent)
        return _begun(functools.partial(self._agent.read_in_steps, arrived=arrived), local, remote, peer)

    def _write(self, local: Ranges, remote: Ranges, peer: Peer) -> int:
        if not isinstance(self._agent, WritingAgent):
            raise TypeError("this transport does not write")
        return _begun(self._agent.write, local, remote, peer)

    def _connect(self, message: ConnectAgent) -> list[FromHelper]:
        self._abandoned = [handle for handle in self._abandoned if not _quietly(self._agent.release, handle)]
        try:
            peer = Peer(self._agent.add_peer(message.agent), message)
            self._agents[message.peer_id] = peer
            slot = self._num_handshakes % NUM_PROOF_SLOTS
            self._num_handshakes += 1
            self._jobs.append(ProofJob(self._read, self._memory, peer, slot))
        except Exception as exc:  # any of the library's classes
            self._drop(message.peer_id)
            return [AgentConnected(peer_id=message.peer_id, order=message.order, error=str(exc))]
        return []

    def _start(self, message: StartPull | StartPush) -> list[FromHelper]:
        peer = self._agents.get(message.peer_id)
        if peer is None:
            return [PullEnded(transfer_id=message.transfer_id, reason=PullEnd.PEER_LOST, num_bytes=0)]
        try:
            self._jobs.append(self._job(peer, message))
        except Exception as exc:  # any of the library's classes
            ended = PullEnded(
                transfer_id=message.transfer_id,
                reason=error_reason(exc),
                num_bytes=0,
                may_write=isinstance(exc, PartlyPosted),
            )
            return [ended, *self._drop(message.peer_id)]
        return []

    def _job(self, peer: Peer, message: StartPull | StartPush) -> Job:
        if isinstance(message, StartPush):
            return PushJob(self._write, self._memory, peer, message, self._throttle)
        takes_steps = isinstance(self._agent, SteppingAgent) and self._agent.takes_steps(peer.name)
        in_steps = self._read_in_steps if takes_steps else None
        return PullJob(self._read, self._memory, peer, message, self._throttle, in_steps)

    def _advance(self, job: Job) -> list[FromHelper]:
        if job.handle is None:
            return self._begin_if_due(job)
        state, peer_id = self._agent.state(job.handle), job.peer.message.peer_id
        if self._agents.get(peer_id) is not job.peer:
            return [] if state is CopyState.RUNNING else self._end_lost(job, state)
        if state is CopyState.RUNNING:
            overdue = isinstance(job, ProofJob) and time.monotonic() > job.deadline_s
            return self._drop(peer_id) if overdue else []
        if state is not CopyState.DONE:
            return self._drop(peer_id)
        self._agent.release(job.handle)
        return self._go_on(job, job.on_done)

    def _begin_if_due(self, job: Job) -> list[FromHelper]:
        """Look after a job that has no read under way."""
        if self._agents.get(job.peer.message.peer_id) is not job.peer:
            return self._end_lost(job, CopyState.FAILED)
        return self._go_on(job, job.on_due)

    def _go_on(self, job: Job, step: Callable[[], FromHelper | None]) -> list[FromHelper]:
        """Do a job's next step, of which may come an answer."""
        peer_id = job.peer.message.peer_id
        try:
            answer = step()
        except Exception as exc:  # any of the library's classes, from beginning the next read
            self._jobs.remove(job)
            return [_lost(job, may_write=isinstance(exc, PartlyPosted)), *self._drop(peer_id)]
        if answer is None:
            self._has_moved |= job.handle is not None
            return []
        self._jobs.remove(job)
        refused = isinstance(answer, AgentConnected) and answer.error
        return [answer, *self._drop(peer_id)] if refused else [answer]

    def _drop(self, peer_id: str) -> list[FromHelper]:
        """Forget a peer and say so of its jobs; of one whose copy runs only when that has ended."""
        peer = self._agents.pop(peer_id, None)
        if peer is None:
            return []
        answers: list[FromHelper] = []
        for job in [each for each in self._jobs if each.peer is peer]:
            if self._is_stopped(job):
                self._jobs.remove(job)
                answers.append(job.on_lost())
            elif isinstance(job, PullJob | PushJob):
                job.reason = job.reason or PullEnd.PEER_LOST
        self._close(peer)
        return answers

    def _is_stopped(self, job: Job) -> bool:
        """Free a job's handle if that can be; whether nothing that matters is written on its behalf from now on."""
        if job.handle is None:
            return True
        if self._agent.state(job.handle) in (CopyState.DONE, CopyState.FAILED):
            _quietly(self._agent.release, job.handle)
            return True
        if isinstance(job, ProofJob):
            # A late proof lands in a slot that no handshake uses for long; a late pull would land in another request's block.
            self._abandoned.append(job.handle)
            return True
        return False

    def _end_lost(self, job: Job, state: CopyState) -> list[FromHelper]:
        """The copy of a job whose peer was dropped has ended, or goes on with nobody being able to tell."""
        if job.handle is not None:
            _quietly(self._agent.release, job.handle)
        self._jobs.remove(job)
        self._close(job.peer)
        return [_lost(job, may_write=state is CopyState.UNSETTLED)]

    def _close(self, peer: Peer) -> None:
        """Close the connection to a dropped peer, once none of its reads runs, unless it has been connected anew."""
        in_use = any(job.peer.name == peer.name for job in self._jobs)
        if not in_use and all(each.name != peer.name for each in self._agents.values()):
            _quietly(self._agent.remove_peer, peer.name)


def _begun(copy: Callable[[Ranges, Ranges, str], int], local: Ranges, remote: Ranges, peer: Peer) -> int:
    """Begin a copy; returns its handle. Raises NothingPosted or PartlyPosted."""
    try:
        return copy(local, remote, peer.name)
    except NothingPosted:
        raise
    except Exception as exc:  # any of the library's classes
        raise PartlyPosted(str(exc)) from exc


def _lost(job: Job, *, may_write: bool) -> FromHelper:
    """What is said of a job whose peer is lost."""
    answer = job.on_lost()
    return msgspec.structs.replace(answer, may_write=True) if may_write and isinstance(answer, PullEnded) else answer


def _quietly(call: Callable[[ArgumentT], None], argument: ArgumentT) -> bool:
    """Do what may fail because a peer is gone; whether it did not."""
    try:
        call(argument)
    except Exception:  # any of the library's classes
        return False
    return True


def main() -> None:
    """Serve one engine until it closes the socket."""
    socket_fd, grave_fd, *memory_fds = (int(argument) for argument in sys.argv[1:])
    # Mapped until this process is gone with all that anybody does to its memory (see `grave`).
    _tombstone = mmap.mmap(grave_fd, mmap.PAGESIZE)
    os.close(grave_fd)
    # The thread that sums shall not wait long for the one that reads, nor that one for it.
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    # Ctrl-C reaches the whole process group; the engine decides when this process ends.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    connection = socket.socket(fileno=socket_fd)
    frames = Frames()
    helper: Helper | None = None
    while True:
        answers: list[FromHelper] = []
        watched: list[socket.socket | Helper] = [connection] if helper is None else [connection, helper]
        readable, _, _ = select.select(watched, [], [], None if helper is None else helper.patience_s)
        if connection in readable:
            data = connection.recv(1 << 16)
            if not data:
                # Without destructors: a library's may wait for peers that are gone.
                os._exit(0)
            for body in frames.feed(data):
                message = to_helper_decoder.decode(body)
                if isinstance(message, Setup):
                    helper = _set_up(connection, message, memory_fds)
                elif helper is not None:
                    answers += helper.handle(message)
        if helper is not None:
            answers += helper.poll()
        if answers:
            connection.sendall(b"".join(frame(answer) for answer in answers))


def _set_up(connection: socket.socket, message: Setup, memory_fds: list[int]) -> Helper:
    try:
        staging = StagingArea(message.lane_bytes, memory_fds[1]) if message.lane_bytes else None
        memory = Memory(memory_fds[0], PoolShape(message.num_blocks, message.block_bytes), staging)
        agent = make_agent(
            message.transport,
            AgentSettings(
                name=message.agent_name,
                on_loopback=message.on_loopback,
                num_threads=message.num_threads,
                host=message.host,
            ),
        )
        agent.register(memory.base, memory.shape.total_bytes)
        agent.register(memory.scratch_address, memory.scratch_bytes)
        if staging is not None:
            agent.register(memory.staging_address, staging.total_bytes)
    except Exception as exc:  # the process's top: the engine decides what to do without it
        connection.sendall(frame(HelperFailed(message=str(exc))))
        os._exit(1)
    ready = HelperReady(
        agent=agent.metadata(), base=memory.base, proof_address=memory.proof_address(-1), proof=memory.own_proof
    )
    connection.sendall(frame(ready))
    return Helper(agent, memory, Throttle(message.throttle_bytes_s))


if __name__ == "__main__":
    main()
