"""Two agents that share reads: what is told of a read when its halves fare differently, and that both halves arrive."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path
from threading import Barrier, Event

import pytest

from pdmesh.connector.native_agent import CopyState, NothingPosted, Ranges, WritingAgent
from pdmesh.connector.native_jobs import ranges
from pdmesh.connector.paired_agent import LEAST_SHARED_BYTES, PairedAgent
from support.native_libraries import missing
from support.no_threads import refuse_threads

HALF_BYTES = LEAST_SHARED_BYTES // 2
TIMEOUT_S = 10.0


class Agent(WritingAgent):
    """A transport as the test wants it: reads begin in the state `begins_as`."""

    def __init__(self) -> None:
        self.begins_as = CopyState.DONE
        self.meeting: Barrier | None = None
        """Where a read waits for one of the other agent's: so both have begun one."""
        self.refusal: Exception | None = None
        """Of all reads."""
        self.regions: list[tuple[int, int]] = []
        self.peers: list[bytes] = []
        self.removed: list[str] = []
        self.read_addresses: list[list[int]] = []
        self.states: list[CopyState] = []
        self.released: list[int] = []

    def register(self, address: int, num_bytes: int) -> None:
        self.regions.append((address, num_bytes))

    def metadata(self) -> bytes:
        return b"own"

    def add_peer(self, metadata: bytes) -> str:
        self.peers.append(metadata)
        return metadata.decode()

    def remove_peer(self, name: str) -> None:
        self.removed.append(name)

    def read(self, local: Ranges, remote: Ranges, peer: str) -> int:
        if self.meeting is not None:
            self.meeting.wait(TIMEOUT_S)
            self.meeting = None
        if self.refusal is not None:
            raise self.refusal
        assert (local == remote).all()
        self.read_addresses.append(local[:, 0].tolist())
        self.states.append(self.begins_as)
        return len(self.states) - 1

    def write(self, local: Ranges, remote: Ranges, peer: str) -> int:
        return self.read(local, remote, peer)

    def state(self, handle: int) -> CopyState:
        return self.states[handle]

    def release(self, handle: int) -> None:
        assert self.states[handle] is not CopyState.RUNNING
        self.released.append(handle)


class Scene:
    def __init__(self) -> None:
        self.first, self.second = Agent(), Agent()
        self.num_made = 0
        self.told: list[int] = []
        """Which ranges of a read were said to be there."""
        self.agent = PairedAgent(self.first, self._made)
        self.agent.register(4096, 1 << 30)

    def _made(self) -> Agent:
        self.num_made += 1
        return self.second

    def read(self, num: int = 3, *, num_bytes: int = HALF_BYTES, peer: str = "owner") -> int:
        blocks = ranges([4096 + index * num_bytes for index in range(num)], num_bytes)
        return self.agent.read_in_steps(blocks, blocks, peer, lambda begin, end: self.told.extend(range(begin, end)))

    def read_by_both(self, num: int = 2) -> int:
        """Read so that either agent takes one step at least."""
        self.told.clear()
        self.first.meeting = self.second.meeting = Barrier(2)
        return self.read(num)

    def join(self, peer: str = "owner") -> None:
        """Connect to a peer, and read until both agents can."""
        assert self.agent.add_peer(peer.encode()) == peer
        end_s = time.monotonic() + TIMEOUT_S
        while not self.agent.takes_steps(peer):
            assert time.monotonic() < end_s, "the second agent is not told of it"
            self.agent.release(self.read(peer=peer))
            time.sleep(0.001)


@pytest.fixture
def scene() -> Scene:
    return Scene()


def test_each_agent_reads_a_part_and_the_two_are_the_whole(scene: Scene) -> None:
    scene.join()
    nums = [len(agent.states) for agent in (scene.first, scene.second)]
    handle = scene.read_by_both(7)
    parts = [agent.read_addresses[num:] for agent, num in zip((scene.first, scene.second), nums, strict=True)]
    assert all(parts)
    read = sorted(address for part in parts for step in part for address in step)
    assert read == [4096 + index * HALF_BYTES for index in range(7)]
    assert scene.second.regions == scene.first.regions
    assert scene.second.peers == [b"owner"]
    assert scene.agent.state(handle) is CopyState.DONE
    assert sorted(scene.told) == list(range(7))
    scene.agent.release(handle)
    for agent, num in zip((scene.first, scene.second), nums, strict=True):
        assert sorted(agent.released) == list(range(len(agent.states)))
        assert len(agent.states) > num


def test_a_thread_that_does_not_come_to_run_is_not_waited_for(scene: Scene) -> None:
    """Halves that were fixed beforehand took as long as the later thread, on a host whose CPUs were taken."""
    scene.join()
    is_free = Event()
    num_read = len(scene.second.states)
    # As good as no CPU: the thread has something else to do.
    scene.agent._thread.submit(is_free.wait, TIMEOUT_S)
    try:
        assert scene.agent.state(scene.read(7)) is CopyState.DONE
        assert sorted(scene.told[-7:]) == list(range(7))
        assert len(scene.second.states) == num_read
    finally:
        is_free.set()


def test_only_what_is_there_is_told_of(scene: Scene) -> None:
    scene.join()
    scene.second.begins_as = CopyState.RUNNING
    scene.read_by_both(2)
    [late] = scene.second.read_addresses[-1]
    assert scene.told == [1 - (late - 4096) // HALF_BYTES]


def test_what_fails_after_a_step_is_told_and_no_step_follows(scene: Scene) -> None:
    """What was to be done with what has arrived, say: its bytes are there, so it is no reason to take the read for undone."""
    scene.join()
    blocks = ranges([4096 + index * HALF_BYTES for index in range(50)], HALF_BYTES)
    num_read = len(scene.first.states) + len(scene.second.states)

    def fail(begin: int, end: int) -> None:
        raise ArithmeticError("no sum")

    with pytest.raises(ArithmeticError, match="no sum"):
        scene.agent.read_in_steps(blocks, blocks, "owner", fail)
    assert len(scene.first.states) + len(scene.second.states) <= num_read + 2


def test_small_reads_and_those_of_the_own_pool_are_not_shared(scene: Scene) -> None:
    scene.join()
    num_shared = len(scene.second.states)
    scene.read(8, num_bytes=8)
    scene.read(1, num_bytes=LEAST_SHARED_BYTES)
    scene.agent.add_peer(b"own")
    for _ in range(3):
        scene.read(peer="own")
    assert len(scene.second.states) == num_shared


def test_a_peer_whose_reads_are_not_done_when_they_are_begun_is_read_by_one(scene: Scene) -> None:
    scene.agent.add_peer(b"owner")
    scene.first.begins_as = CopyState.RUNNING
    for _ in range(3):
        scene.read()
    assert scene.num_made == 0


@pytest.mark.parametrize("ends", [(0, 1), (1, 0)])
def test_a_read_runs_until_both_halves_have_ended(scene: Scene, ends: tuple[int, int]) -> None:
    scene.join()
    agents = (scene.first, scene.second)
    for agent in agents:
        agent.begins_as = CopyState.RUNNING
    handle = scene.read_by_both()
    agents[ends[0]].states[-1] = CopyState.FAILED
    assert scene.agent.state(handle) is CopyState.RUNNING
    num_released = [len(agent.released) for agent in agents]
    with pytest.raises(RuntimeError, match="runs"):
        scene.agent.release(handle)
    assert [len(agent.released) for agent in agents] == num_released
    agents[ends[1]].states[-1] = CopyState.DONE
    # What has ended is not asked again: a library may say something else then.
    agents[ends[0]].states[-1] = CopyState.DONE
    assert scene.agent.state(handle) is CopyState.FAILED
    scene.agent.release(handle)
    assert [len(agent.released) for agent in agents] == [num + 1 for num in num_released]


def test_that_a_half_may_go_on_unseen_is_said_while_the_other_runs(scene: Scene) -> None:
    scene.join()
    scene.first.begins_as = scene.second.begins_as = CopyState.RUNNING
    handle = scene.read_by_both()
    scene.second.states[-1] = CopyState.UNSETTLED
    assert scene.agent.state(handle) is CopyState.UNSETTLED


@pytest.mark.parametrize("refusing", [0, 1])
def test_a_half_that_cannot_be_begun_ends_a_read_only_where_the_other_does_not_run(scene: Scene, refusing: int) -> None:
    scene.join()
    agents = (scene.first, scene.second)
    agents[refusing].refusal = NothingPosted("gone")
    other = agents[1 - refusing]
    with pytest.raises(NothingPosted, match="gone"):
        scene.read_by_both()
    assert other.released[-1] == len(other.states) - 1
    other.begins_as = CopyState.RUNNING
    with pytest.raises(RuntimeError, match="gone") as raised:
        scene.read_by_both()
    assert not isinstance(raised.value, NothingPosted)
    other.refusal = NothingPosted("gone too")
    with pytest.raises(NothingPosted):
        scene.read_by_both()
    other.refusal = RuntimeError("half of it")
    with pytest.raises(RuntimeError, match="half of it"):
        scene.read_by_both()


def test_a_peer_that_goes_is_forgotten_by_both_and_may_come_back(scene: Scene) -> None:
    scene.join()
    scene.agent.remove_peer("owner")
    scene.join()
    assert scene.first.removed == scene.second.removed == ["owner"]
    assert scene.second.peers == [b"owner", b"owner"]
    assert scene.num_made == 1


def test_where_there_can_be_no_second_agent_the_first_reads_all(scene: Scene, caplog: pytest.LogCaptureFixture) -> None:
    num_tried = 0

    def refuse() -> Agent:
        nonlocal num_tried
        num_tried += 1
        raise RuntimeError("no device")

    scene.agent = PairedAgent(scene.first, refuse)
    scene.agent.add_peer(b"owner")
    end_s = time.monotonic() + TIMEOUT_S
    while "no device" not in caplog.text:
        assert time.monotonic() < end_s, "nobody says so"
        scene.agent.release(scene.read())
        time.sleep(0.001)
    for _ in range(5):
        scene.agent.release(scene.read())
        assert len(scene.first.read_addresses[-1]) == 3
        # For a thread that would try it again.
        time.sleep(0.01)
    assert num_tried == 1


def test_reads_go_on_where_no_thread_can_be_started_any_more(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    refuse_threads(monkeypatch)
    scene.join()


@pytest.mark.skipif(missing("nixl") != "", reason=missing("nixl"))
@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two CPUs")
def test_over_nixl_both_halves_of_a_read_arrive_and_nobody_stays_awake() -> None:
    script = Path(__file__).parents[1] / "support" / "paired_read.py"
    result = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=60)
    assert result.stdout == "2 whole idle\n", result.stderr
