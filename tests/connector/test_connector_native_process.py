"""The helper's orders over an agent that the test plays: above all, no pull is said to have ended while its read may run."""

from __future__ import annotations

import os
import select
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pdmesh.connector import native_jobs, native_push_job, native_sums
from pdmesh.connector.native_agent import Arrived, CopyState, NothingPosted, SteppingAgent, WritingAgent
from pdmesh.connector.native_jobs import Memory
from pdmesh.connector.native_messages import (
    AgentConnected,
    CancelPull,
    ConnectAgent,
    DisconnectAgent,
    FromHelper,
    PullEnded,
    StartPull,
    StartPush,
)
from pdmesh.connector.native_process import Helper
from pdmesh.connector.pool import PoolShape, create_pool_file, size_pool_file
from pdmesh.connector.throttle import Throttle
from pdmesh_kernels.block_sum import sum_blocks
from support.native_libraries import missing

SHAPE = PoolShape(num_blocks=4, block_bytes=4096)
LARGE = PoolShape(num_blocks=40, block_bytes=4096)
PROOF = b"p" * 32


class Agent(WritingAgent):
    """NIXL as the test wants it: each read is in the state the test gives it; running ones refuse to be released."""

    def __init__(self) -> None:
        self.states: list[CopyState] = []
        self.reads: list[Any] = []
        self.sources: list[Any] = []
        self.writes: list[Any] = []
        self.refused_write = 0
        """The one, counted from 1, that cannot be posted whole."""
        self.refusal: Exception | None = None
        """Of the next read."""
        self.released: list[int] = []
        self.removed: list[str] = []

    def add_peer(self, metadata: bytes) -> str:
        return metadata.decode()

    def remove_peer(self, name: str) -> None:
        self.removed.append(name)

    def read(self, local: Any, remote: Any, peer: str) -> int:
        if self.refusal is not None:
            refusal, self.refusal = self.refusal, None
            raise refusal
        self.states.append(CopyState.RUNNING)
        self.reads.append(local)
        self.sources.append(remote)
        return len(self.states) - 1

    def write(self, local: Any, remote: Any, peer: str) -> int:
        self.writes.append(local)
        if len(self.writes) == self.refused_write:
            raise RuntimeError("NIXL_ERR_BACKEND")
        self.states.append(CopyState.RUNNING)
        return len(self.states) - 1

    def register(self, address: int, num_bytes: int) -> None:
        pass

    def metadata(self) -> bytes:
        return b"own"

    def state(self, handle: int) -> CopyState:
        return self.states[handle]

    def release(self, handle: int) -> None:
        if self.states[handle] is CopyState.RUNNING:
            raise RuntimeError("the copy runs")
        self.released.append(handle)


def pull(transfer_id: str, target: int = 0, peer_id: str = "owner@1") -> StartPull:
    return StartPull(
        transfer_id=transfer_id,
        peer_id=peer_id,
        source_block_ids=[0],
        generations=[0],
        target_block_ids=[target],
        deadline_s=30.0,
        checksums=[],
    )


class AgentInSteps(Agent, SteppingAgent):
    """One whose reads may be there, in parts or whole, before the call returns."""

    def __init__(self) -> None:
        super().__init__()
        self.told: list[tuple[int, int]] = []
        """Which ranges of each read are there then."""
        self.let_arrive: Callable[[Any], None] = lambda local: None

    def takes_steps(self, peer: str) -> bool:
        return True

    def read_in_steps(self, local: Any, remote: Any, peer: str, arrived: Arrived) -> int:
        handle = self.read(local, remote, peer)
        for begin, end in self.told:
            self.let_arrive(local[begin:end])
            arrived(begin, end)
        return handle


class Scene:
    make_agent: Callable[[], Agent] = Agent

    def __init__(self, shape: PoolShape = SHAPE) -> None:
        fd = create_pool_file("test")
        size_pool_file(fd, shape)
        self.memory = Memory(fd, shape)
        os.close(fd)
        self.agent = self.make_agent()
        self.helper = Helper(self.agent, self.memory, Throttle(0))

    def connect(self, peer_id: str = "owner@1", agent: bytes = b"agent-1") -> None:
        order = ConnectAgent(
            peer_id=peer_id, agent=agent, base=0, header_bytes=4096, proof_address=0, proof=self.memory.own_proof
        )
        self.helper.handle(order)
        handle = len(self.agent.states) - 1
        # The proof "arrives".
        self.memory.proofs[: len(self.agent.states)] = self.memory.proofs[-1]
        self.agent.states[handle] = CopyState.DONE
        assert self.helper.poll() == [AgentConnected(peer_id=peer_id)]

    def start(self, transfer_id: str, target: int, peer_id: str = "owner@1") -> int:
        """Begin a pull; the handle of its read."""
        assert self.helper.handle(pull(transfer_id, target, peer_id)) == []
        return len(self.agent.states) - 1

    def push(self) -> list[FromHelper]:
        """Begin a write of all blocks; what is said of it at once."""
        blocks = list(range(SHAPE.num_blocks))
        push = StartPush(
            transfer_id="w", peer_id="owner@1", source_block_ids=blocks, target_block_ids=blocks, deadline_s=30.0
        )
        return self.helper.handle(push)


@pytest.fixture
def scene() -> Scene:
    return Scene()


def ended(transfer_id: str, reason: str = "peer_lost") -> PullEnded:
    return PullEnded(transfer_id=transfer_id, reason=reason, num_bytes=0)


def test_a_lost_peers_pull_ends_when_its_read_has(scene: Scene) -> None:
    """It was said to have ended at once: its blocks went to another request, and the late read landed in them."""
    scene.connect()
    handles = [scene.start(name, target) for target, name in enumerate("abc")]
    scene.agent.states[handles[0]] = CopyState.FAILED
    # The peer is lost for all of them, but two reads still run.
    assert scene.helper.poll() == [ended("a")]
    assert scene.helper.poll() == []
    assert scene.helper.patience_s is not None
    assert scene.agent.removed == []
    scene.agent.states[handles[1]] = CopyState.FAILED
    assert scene.helper.poll() == [ended("b")]
    # Even one that has arrived after all: the peer was given up before.
    scene.agent.states[handles[2]] = CopyState.DONE
    assert scene.helper.poll() == [ended("c")]
    assert scene.helper.patience_s is None
    assert scene.agent.removed == ["agent-1"]
    assert set(handles) <= set(scene.agent.released)


def test_disconnecting_waits_for_running_reads_too(scene: Scene) -> None:
    scene.connect()
    handle = scene.start("a", 0)
    scene.helper.handle(CancelPull(transfer_id="a"))
    assert scene.helper.handle(DisconnectAgent(peer_id="owner@1")) == []
    assert scene.helper.poll() == []
    scene.agent.states[handle] = CopyState.FAILED
    assert scene.helper.poll() == [ended("a", "cancelled")]


def test_a_peer_that_comes_back_is_not_dropped_with_its_old_reads(scene: Scene) -> None:
    scene.connect()
    old = scene.start("old", 0)
    scene.connect()
    new = scene.start("new", 1)
    scene.agent.states[old] = CopyState.FAILED
    assert scene.helper.poll() == [ended("old")]
    # Its name is in use again: closing by that name would close the new connection.
    assert scene.agent.removed == []
    scene.agent.states[new] = CopyState.DONE
    assert scene.helper.poll() == []
    scene.agent.states[-1] = CopyState.DONE
    assert [each.reason for each in scene.helper.poll() if isinstance(each, PullEnded)] == [""]


def test_a_cancelled_write_stops_between_its_pieces(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    """It was posted whole, so that on a slow link only the end of the whole process stopped it."""
    monkeypatch.setattr(native_push_job, "PIECE_BYTES", 2 * SHAPE.block_bytes)
    scene.connect()
    assert scene.push() == []
    assert [len(each) for each in scene.agent.writes] == [2]
    scene.helper.handle(CancelPull(transfer_id="w"))
    assert scene.helper.poll() == []
    scene.agent.states[-1] = CopyState.DONE
    assert scene.helper.poll() == [ended("w", "cancelled")]
    assert len(scene.agent.writes) == 1


@pytest.mark.parametrize("number", [1, 2])
def test_a_write_that_was_not_posted_whole_may_still_arrive(
    scene: Scene, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    monkeypatch.setattr(native_push_job, "PIECE_BYTES", 2 * SHAPE.block_bytes)
    scene.connect()
    scene.agent.refused_write = number
    answers = scene.push()
    if number == 2:
        assert answers == []
        scene.agent.states[-1] = CopyState.DONE
        answers = scene.helper.poll()
    [answer] = answers
    assert isinstance(answer, PullEnded)
    assert (answer.transfer_id, answer.may_write) == ("w", True)
    assert answer.reason


def test_a_read_that_was_not_posted_whole_may_go_on(scene: Scene) -> None:
    """Its pull was said to have ended, while what had been posted of it was on its way into blocks of others."""
    scene.connect()
    scene.agent.refusal = RuntimeError("NIXL_ERR_BACKEND")
    [answer] = scene.helper.handle(pull("whole"))
    assert isinstance(answer, PullEnded)
    assert (answer.transfer_id, answer.may_write) == ("whole", True)
    scene.connect()
    handle = scene.start("words", 1)
    scene.agent.refusal = RuntimeError("NIXL_ERR_BACKEND")
    scene.agent.states[handle] = CopyState.DONE
    [answer] = scene.helper.poll()
    assert isinstance(answer, PullEnded)
    assert (answer.transfer_id, answer.may_write) == ("words", True)


def test_a_read_of_which_nothing_was_posted_is_over(scene: Scene) -> None:
    scene.connect()
    scene.agent.refusal = NothingPosted("the peer is gone")
    [answer] = scene.helper.handle(pull("none"))
    assert isinstance(answer, PullEnded)
    assert (answer.reason, answer.may_write) == ("error:the peer is gone", False)


def test_a_read_whose_failure_settles_nothing_may_go_on(scene: Scene) -> None:
    scene.connect()
    handle = scene.start("a", 0)
    scene.agent.states[handle] = CopyState.UNSETTLED
    answers = [*scene.helper.poll(), *scene.helper.poll()]
    assert [(each.transfer_id, each.may_write) for each in answers if isinstance(each, PullEnded)] == [("a", True)]
    assert scene.helper.patience_s is None


def test_a_connection_is_not_closed_under_an_older_read_of_the_same_agent(scene: Scene) -> None:
    scene.connect()
    old = scene.start("old", 0)
    scene.connect()
    assert scene.helper.handle(DisconnectAgent(peer_id="owner@1")) == []
    assert scene.agent.removed == []
    scene.agent.states[old] = CopyState.FAILED
    assert scene.helper.poll() == [ended("old")]
    assert scene.agent.removed == ["agent-1"]


def test_a_proof_that_hangs_is_freed_when_it_has_ended(scene: Scene) -> None:
    order = ConnectAgent(
        peer_id="hung@1", agent=b"agent-2", base=0, header_bytes=4096, proof_address=0, proof=scene.memory.own_proof
    )
    assert scene.helper.handle(order) == []
    assert len(scene.helper.handle(DisconnectAgent(peer_id="hung@1"))) == 1
    assert scene.helper.patience_s is None
    scene.connect()
    assert scene.agent.released == [1]
    scene.agent.states[0] = CopyState.FAILED
    scene.connect()
    assert 0 in scene.agent.released


@pytest.mark.skipif(bool(missing("nixl")), reason=missing("nixl"))
@pytest.mark.parametrize("how", ["disconnect", "reconnect", "release"])
def test_nixl_writes_nothing_once_a_pull_is_said_to_have_ended(how: str) -> None:
    """NIXL says of a read that runs that it is released, and goes on writing: 80 of 160 blocks were overwritten after their pull
    had been said to have ended, and its blocks were another request's."""
    support = Path(__file__).parents[1] / "support"
    environment = os.environ | {"UCX_TLS": "tcp", "UCX_NET_DEVICES": "lo", "NIXL_LOG_LEVEL": "ERROR"}
    # Where the kernel lets the one end run on, NIXL now and then has all bytes across before it says that it has begun.
    for _ in range(5):
        done = subprocess.run(
            [sys.executable, str(support / "late_read.py"), how],
            env=environment,
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert done.returncode == 0, done.stderr
        num_running, num_late = map(int, done.stdout.split())
        if num_running:
            break
    assert num_running > 0, "the read was too fast for this test"
    assert num_late == 0


class CheckedPull:
    """A pull of blocks that are summed as they arrive; the test lets them arrive, piece by piece."""

    TARGETS = (*range(10, 30), 5, 6, 31, 33)
    SOURCES = (*range(100, 120), 7, 8, 40, 41)

    def __init__(
        self,
        monkeypatch: pytest.MonkeyPatch,
        beside: CheckedPull | None = None,
        damaged: int | None = None,
        told: list[tuple[int, int]] | None = None,
    ) -> None:
        """`beside`: whose thread sums this one's blocks too, as all pulls of a helper share one. `damaged`: place of a block that
        arrives otherwise. `told`: which ranges of each read are there before it returns, where the agent reads in steps."""
        monkeypatch.setattr(native_jobs, "PIECE_BYTES", 8 * LARGE.block_bytes)
        monkeypatch.setattr(native_jobs, "LEAST_PIECE_BYTES", 2 * LARGE.block_bytes)
        monkeypatch.setattr(native_jobs, "LARGE_PIECE_BYTES", 12 * LARGE.block_bytes)
        if told is not None:
            monkeypatch.setattr(Scene, "make_agent", AgentInSteps)
        self.scene = Scene(LARGE)
        if beside is not None:
            self.scene.memory.sums_thread = beside.scene.memory.sums_thread
        self.scene.connect()
        blocks = self.scene.memory.pool.blocks
        blocks[:] = np.random.default_rng(3).integers(0, 256, blocks.shape, dtype=np.uint8)
        self.content = blocks[list(self.TARGETS)].copy()
        self.sums = sum_blocks(blocks, self.TARGETS).tolist()
        blocks[:] = 0
        if damaged is not None:
            self.content[damaged, 77] ^= 1
        if isinstance(self.scene.agent, AgentInSteps):
            self.scene.agent.told, self.scene.agent.let_arrive = told or [], self._fill
        self.first_read = len(self.scene.agent.reads)
        self.scene.helper.handle(
            StartPull(
                transfer_id="t",
                peer_id="owner@1",
                source_block_ids=list(self.SOURCES),
                generations=[1000 + each for each in self.TARGETS],
                target_block_ids=list(self.TARGETS),
                deadline_s=30.0,
                checksums=self.sums,
            )
        )

    def arrive(self) -> list[FromHelper]:
        """Let arrive what is being read."""
        memory = self.scene.memory
        self._fill(self.scene.agent.reads[-1])
        for block in self.TARGETS:
            memory.words[block] = 1000 + block
        self.scene.agent.states[-1] = CopyState.DONE
        return self.scene.helper.poll()

    def _fill(self, local: Any) -> None:
        """Bring the blocks of these ranges."""
        blocks = self.scene.memory.pool.blocks
        base = blocks.ctypes.data
        for address in local[:, 0].tolist():
            block = (address - base) // LARGE.block_bytes
            if block in self.TARGETS and 0 <= address - base < blocks.nbytes:
                blocks[block] = self.content[self.TARGETS.index(block)]

    def judged(self) -> list[FromHelper]:
        """What becomes of it when no read is under way: it waits for its sums then."""
        if any(job.handle is not None for job in self.scene.helper._jobs):
            return []
        assert select.select([self.scene.helper], [], [], 10)[0]
        return self.scene.helper.poll()

    def arrive_whole(self) -> str:
        for _ in range(50):
            if answers := self.arrive() or self.judged():
                [answer] = answers
                assert isinstance(answer, PullEnded)
                return answer.reason
        raise AssertionError("it does not end")


def test_a_checked_pull_is_read_in_pieces_of_which_the_last_are_small_and_its_words_in_runs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pull = CheckedPull(monkeypatch)
    assert pull.arrive_whole() == ""
    agent, memory = pull.scene.agent, pull.scene.memory
    *pieces, words = agent.reads[pull.first_read :]
    assert [len(each) for each in pieces] == [8, 8, 6, 2]
    base, size = memory.pool.blocks.ctypes.data, LARGE.block_bytes
    addresses = [address for piece in pieces for address in piece[:, 0].tolist()]
    assert addresses == [base + each * size for each in pull.TARGETS]
    first = memory.scratch_address
    assert words[:, :2].tolist() == [[first + at * 8, num * 8] for at, num in ((10, 20), (5, 2), (31, 1), (33, 1))]
    assert agent.sources[-1][:, :2].tolist() == [[100 * 8, 20 * 8], [7 * 8, 16], [40 * 8, 8], [41 * 8, 8]]


@pytest.mark.parametrize("place", [0, 7, 8, 21, 23])
def test_a_damaged_block_is_found_in_whichever_piece_it_came(monkeypatch: pytest.MonkeyPatch, place: int) -> None:
    pull = CheckedPull(monkeypatch)
    pull.content[place, 77] ^= 1
    assert pull.arrive_whole() == "corrupt"


def test_pieces_that_come_after_a_long_pause_are_summed_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """The thread leaves a pull of which nothing comes: a peer that stands still must not keep others' pulls from being summed."""
    monkeypatch.setattr(native_sums, "PATIENCE_S", 0.0)
    slow = CheckedPull(monkeypatch)
    other = CheckedPull(monkeypatch, slow)
    assert slow.arrive() == []
    assert other.arrive_whole() == ""
    time.sleep(0.02)
    assert slow.arrive_whole() == ""


def test_a_pull_that_fails_is_not_summed_further(monkeypatch: pytest.MonkeyPatch) -> None:
    pull = CheckedPull(monkeypatch)
    assert pull.arrive() == []
    pull.scene.agent.states[-1] = CopyState.FAILED
    assert pull.scene.helper.poll() == [ended("t")]
    again = CheckedPull(monkeypatch, pull)
    assert again.arrive_whole() == ""


IN_STEPS = [[], [(0, 12)], [(4, 12), (0, 4)], [(0, 5)], [(3, 12)]]
"""What of each read of twelve blocks is there, and summed by who copied it, before the read returns."""


@pytest.mark.parametrize("told", IN_STEPS)
@pytest.mark.parametrize("damaged", [None, 0, 4, 11, 12, 23])
def test_blocks_are_judged_by_sums_whoever_made_them(
    monkeypatch: pytest.MonkeyPatch, told: list[tuple[int, int]], damaged: int | None
) -> None:
    pull = CheckedPull(monkeypatch, damaged=damaged, told=told)
    assert pull.arrive_whole() == ("" if damaged is None else "corrupt")
    *pieces, _words = pull.scene.agent.reads[pull.first_read :]
    assert [len(each) for each in pieces] == [12, 12]


@pytest.mark.parametrize("damaged", [None, 0, 23])
def test_a_pull_that_is_read_in_steps_from_its_middle_on_is_judged_whole(
    monkeypatch: pytest.MonkeyPatch, damaged: int | None
) -> None:
    pull = CheckedPull(monkeypatch, damaged=damaged, told=[])
    agent = pull.scene.agent
    assert isinstance(agent, AgentInSteps)
    agent.told = [(0, 12)]
    assert pull.arrive_whole() == ("" if damaged is None else "corrupt")


def test_what_was_summed_on_the_way_waits_for_no_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """A third thread beside the two that copy took 5 ms of 16 from them."""

    def refuse(thread: native_sums.SumsThread, arriving: native_sums.ArrivingBlocks) -> None:
        raise AssertionError("the thread is given something to sum")

    monkeypatch.setattr(native_sums.SumsThread, "add", refuse)
    assert CheckedPull(monkeypatch, told=[(0, 12)]).arrive_whole() == ""


def held_verdict(monkeypatch: pytest.MonkeyPatch) -> tuple[CheckedPull, threading.Event]:
    """A pull of which all has arrived, and whose sums are not there before the event."""
    held = threading.Event()
    follow = native_sums.ArrivingBlocks.follow

    def follow_late(arriving: native_sums.ArrivingBlocks) -> None:
        assert held.wait(10)
        follow(arriving)

    monkeypatch.setattr(native_sums.ArrivingBlocks, "follow", follow_late)
    pull = CheckedPull(monkeypatch)
    while pull.scene.helper._jobs[0].handle is not None:
        assert pull.arrive() == []
    return pull, held


def test_others_go_on_while_a_pulls_sums_are_awaited(monkeypatch: pytest.MonkeyPatch) -> None:
    """The helper's only thread waited for them: with thirty others on their way it stood still for a fifth of a second, and with
    some more a cancelled pull passed its fence and cost all their helper."""
    pull, held = held_verdict(monkeypatch)
    scene = pull.scene
    other = scene.start("other", 0)
    for _ in range(2):
        scene.agent.states[-1] = CopyState.DONE
        answers = scene.helper.poll()
    assert [(each.transfer_id, each.reason) for each in answers if isinstance(each, PullEnded)] == [("other", "")]
    assert other in scene.agent.released
    held.set()
    assert select.select([scene.helper], [], [], 10)[0]
    [answer] = scene.helper.poll()
    assert answer == PullEnded(transfer_id="t", reason="", num_bytes=len(pull.TARGETS) * LARGE.block_bytes)
    assert scene.helper.patience_s is None


@pytest.mark.parametrize("why", ["cancelled", "timeout", "peer_lost"])
def test_a_pull_whose_sums_are_awaited_ends_for_other_reasons_too(monkeypatch: pytest.MonkeyPatch, why: str) -> None:
    pull, held = held_verdict(monkeypatch)
    helper = pull.scene.helper
    assert helper.patience_s is not None
    assert helper.poll() == []
    if why == "cancelled":
        helper.handle(CancelPull(transfer_id="t"))
        answers = helper.poll()
    elif why == "timeout":
        late_s = time.monotonic() + 31
        monkeypatch.setattr(native_jobs.time, "monotonic", lambda: late_s)
        answers = helper.poll()
    else:
        answers = helper.handle(DisconnectAgent(peer_id="owner@1"))
    assert answers == [ended("t", why)]
    held.set()
    # The verdict that comes after all is nobody's.
    assert helper.poll() == []
    assert helper.patience_s is None


def test_who_is_whole_does_not_wait_for_those_of_which_nothing_comes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native_sums, "PATIENCE_S", 3600.0)
    slow = CheckedPull(monkeypatch)
    whole = CheckedPull(monkeypatch, slow)
    assert slow.arrive() == []
    assert whole.arrive_whole() == ""
