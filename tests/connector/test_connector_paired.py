"""Two agents that share reads: what is told of a read when its halves fare differently, and that both halves arrive."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

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
        self.agent = PairedAgent(self.first, self._made)
        self.agent.register(4096, 1 << 30)

    def _made(self) -> Agent:
        self.num_made += 1
        return self.second

    def read(self, num: int = 3, *, num_bytes: int = HALF_BYTES, peer: str = "owner") -> int:
        blocks = ranges([4096 + index * num_bytes for index in range(num)], num_bytes)
        return self.agent.read(blocks, blocks, peer)

    def join(self, peer: str = "owner") -> None:
        """Connect to a peer, and read until both agents do."""
        assert self.agent.add_peer(peer.encode()) == peer
        end_s, num_before = time.monotonic() + TIMEOUT_S, len(self.second.states)
        while len(self.second.states) == num_before:
            assert time.monotonic() < end_s, "the second agent reads nothing"
            self.agent.release(self.read(peer=peer))
            time.sleep(0.001)


@pytest.fixture
def scene() -> Scene:
    return Scene()


def test_each_agent_reads_a_part_and_the_two_are_the_whole(scene: Scene) -> None:
    scene.join()
    handle = scene.read(5)
    first, second = scene.first.read_addresses[-1], scene.second.read_addresses[-1]
    assert first + second == [4096 + index * HALF_BYTES for index in range(5)]
    assert len(first) == 2
    assert scene.second.regions == scene.first.regions
    assert scene.second.peers == [b"owner"]
    assert scene.agent.state(handle) is CopyState.DONE
    scene.agent.release(handle)
    assert (scene.first.released[-1], scene.second.released[-1]) == (
        len(scene.first.states) - 1,
        len(scene.second.states) - 1,
    )


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
    handle = scene.read()
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
    handle = scene.read()
    scene.second.states[-1] = CopyState.UNSETTLED
    assert scene.agent.state(handle) is CopyState.UNSETTLED


@pytest.mark.parametrize("refusing", [0, 1])
def test_a_half_that_cannot_be_begun_ends_a_read_only_where_the_other_does_not_run(scene: Scene, refusing: int) -> None:
    scene.join()
    agents = (scene.first, scene.second)
    agents[refusing].refusal = NothingPosted("gone")
    other = agents[1 - refusing]
    with pytest.raises(NothingPosted, match="gone"):
        scene.read()
    assert other.released[-1] == len(other.states) - 1
    other.begins_as = CopyState.RUNNING
    with pytest.raises(RuntimeError, match="gone") as raised:
        scene.read()
    assert not isinstance(raised.value, NothingPosted)
    other.refusal = NothingPosted("gone too")
    with pytest.raises(NothingPosted):
        scene.read()
    other.refusal = RuntimeError("half of it")
    with pytest.raises(RuntimeError, match="half of it"):
        scene.read()


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
