"""Native helper processes: what the death of one costs, that it costs nothing while idle, and who may start it."""

import importlib.util
import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import psutil
import pytest

from pdmesh.connector import native_helper
from pdmesh.connector.base import Pull
from pdmesh.connector.native_messages import DisconnectAgent, Frames, PullEnded, frame, from_helper_decoder
from pdmesh.connector.nixl import NixlConnector
from pdmesh.connector.pool import PoolShape
from pdmesh.connector.registry import make_worker_connectors
from pdmesh.errors import ConfigError, HandshakeRefused
from pdmesh.security import MeshSecret
from support.native_libraries import missing
from support.pool_node import SECRET, Node, make_pool, pool_node, wait_for
from support.until import until

SHAPE = PoolShape(num_blocks=32, block_bytes=64 << 10)
BLOCKS = list(range(32))


class Consumer:
    def __init__(self, name: str) -> None:
        made = make_worker_connectors([name], peer_id="consumer@1", secret=MeshSecret(SECRET), on_loopback=True)
        self.connector = made[name]
        self.pool = make_pool(SHAPE, filled=False)
        self.changes: list[bytes] = []
        self.metadata = self.connector.register(self.pool)
        self.connector.watch_metadata(self.changes.append)
        self._num_pulls = 0

    def pull(self, node: Node) -> str:
        """Pull everything and return the reason."""
        self._num_pulls += 1
        self.connector.start(
            Pull(
                transfer_id=f"t{self._num_pulls}",
                peer_id=node.peer_id,
                source_block_ids=BLOCKS,
                generations=node.first_generations,
                target_block_ids=BLOCKS,
                deadline_s=5.0,
            )
        )
        (result,) = wait_for(self.connector, 1, 8.0)
        return result.reason


@contextmanager
def consuming(name: str) -> Iterator[Consumer]:
    consumer = Consumer(name)
    try:
        yield consumer
    finally:
        consumer.connector.close()
        consumer.pool.close()


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(name, marks=pytest.mark.skipif(bool(missing(name)), reason=missing(name)))
        for name in ("nixl", "mooncake", "ucxx")
    ],
)
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def node(name: str) -> Iterator[Node]:
    with pool_node([name], SHAPE) as made:
        yield made


def helper_of(pid: int) -> psutil.Process:
    """The helper process of a process; waits for one that is being started."""
    end_s = time.monotonic() + 5
    while time.monotonic() < end_s:
        for child in psutil.Process(pid).children():
            if "pdmesh.connector.native_process" in " ".join(child.cmdline()):
                return child
        time.sleep(0.02)
    raise AssertionError("there is no helper process")


@pytest.mark.parametrize("number", [signal.SIGSEGV, signal.SIGKILL])
def test_a_crash_on_the_consumers_side_heals_by_itself(name: str, node: Node, number: int) -> None:
    with consuming(name) as consumer:
        consumer.connector.connect(node.pool_for(name))
        assert consumer.pull(node) == ""
        helper_of(os.getpid()).send_signal(number)
        until(lambda: consumer.changes)
        assert consumer.changes[0] != consumer.metadata
        # The new process has connected to the old one's peers.
        assert consumer.pull(node) == ""


def test_a_crash_during_pulls_ends_them(name: str, node: Node) -> None:
    with consuming(name) as consumer:
        consumer.connector.connect(node.pool_for(name))
        helper = helper_of(os.getpid())
        helper.suspend()
        for transfer_id in ("a", "b"):
            consumer.connector.start(
                Pull(
                    transfer_id=transfer_id,
                    peer_id=node.peer_id,
                    source_block_ids=[1],
                    generations=node.first_generations[1:2],
                    target_block_ids=[1],
                    deadline_s=5.0,
                )
            )
        helper.kill()
        results = wait_for(consumer.connector, 2, 5.0)
        assert {each.transfer_id for each in results} == {"a", "b"}
        assert all(each.reason.startswith("error:") for each in results)


def test_an_order_is_not_carried_out_when_its_pull_has_ended(name: str, node: Node) -> None:
    """A pull may be ended with one life of the helper while its order is being queued: the next life read into blocks that
    were another's by then."""
    with consuming(name) as consumer:
        consumer.connector.connect(node.pool_for(name))
        helper = consumer.connector._helper  # type: ignore[attr-defined]
        pull = Pull(
            transfer_id="ended",
            peer_id=node.peer_id,
            source_block_ids=[3],
            generations=node.first_generations[3:4],
            target_block_ids=[3],
            deadline_s=5.0,
        )
        send = helper.send

        def send_late(order: object) -> None:
            helper._fail_all("it crashed")
            send(order)

        helper.send = send_late
        consumer.connector.start(pull)
        helper.send = send
        (result,) = wait_for(consumer.connector, 1, 5.0)
        assert result.reason.startswith("error:")
        consumer.connector.start(replace(pull, transfer_id="other", target_block_ids=[5]))
        assert [each.reason for each in wait_for(consumer.connector, 1, 5.0)] == [""]
        assert consumer.pool.blocks[5].any()
        assert not consumer.pool.blocks[3].any()


def test_a_helper_that_hangs_is_killed_when_a_pull_is_overdue(name: str, node: Node) -> None:
    """Nothing may write to a block after its pull has ended: what cannot be stopped is killed first."""
    with consuming(name) as consumer:
        consumer.connector.connect(node.pool_for(name))
        helper = helper_of(os.getpid())
        helper.suspend()
        started_s = time.monotonic()
        pull = Pull(
            transfer_id="late",
            peer_id=node.peer_id,
            source_block_ids=BLOCKS,
            generations=node.first_generations,
            target_block_ids=BLOCKS,
            deadline_s=0.3,
        )
        consumer.connector.start(pull)
        (result,) = wait_for(consumer.connector, 1, 5.0)
        assert result.reason == "timeout"
        assert time.monotonic() - started_s < 3.0
        assert not helper.is_running()
        until(lambda: consumer.changes)
        assert consumer.pull(node) == ""


def test_a_peer_whose_connect_was_not_answered_in_time_is_let_go(
    name: str, node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The helper connected it after that, and kept it for as long as it lived itself."""
    monkeypatch.setattr(native_helper, "CONNECT_TIMEOUT_S", 0.2)
    with consuming(name) as consumer:
        helper = consumer.connector._helper  # type: ignore[attr-defined]
        sent: list[object] = []
        send = helper.send

        def note(order: object) -> None:
            sent.append(order)
            send(order)

        helper.send = note
        process = helper_of(os.getpid())
        process.suspend()
        with pytest.raises(HandshakeRefused, match="no answer"):
            consumer.connector.connect(node.pool_for(name))
        process.resume()
        assert sent[-1] == DisconnectAgent(peer_id=node.peer_id)


def test_a_read_that_may_go_on_ends_with_its_helper(name: str, node: Node) -> None:
    """A read that failed half-way, so that nobody can say what of it still runs, is over when the process is dead."""
    with consuming(name) as consumer:
        consumer.connector.connect(node.pool_for(name))
        process = helper_of(os.getpid())
        process.suspend()
        consumer.connector.start(
            Pull(
                transfer_id="half",
                peer_id=node.peer_id,
                source_block_ids=BLOCKS,
                generations=node.first_generations,
                target_block_ids=BLOCKS,
                deadline_s=60.0,
            )
        )
        helper = consumer.connector._helper  # type: ignore[attr-defined]
        said = PullEnded(transfer_id="half", reason="error:half of it", num_bytes=0, may_write=True)
        helper._hear(next(iter(Frames().feed(frame(said)))))
        assert process.is_running()
        assert consumer.connector.poll() == []
        helper.wake()
        (result,) = wait_for(consumer.connector, 1, 5.0)
        assert result.reason.startswith("error:")
        assert not process.is_running()
        until(lambda: consumer.changes)
        assert consumer.pull(node) == ""


def test_a_crash_on_the_owners_side_needs_its_new_metadata(name: str) -> None:
    with pool_node([name], SHAPE, "mortal@1") as mortal, consuming(name) as consumer:
        consumer.connector.connect(mortal.pool_for(name))
        helper = helper_of(mortal.process.pid)
        helper.kill()
        # Until it has gone its memory can be read, and rightly.
        helper.wait(10)
        assert consumer.pull(mortal) != ""
        old = mortal.pool_for(name)
        until(mortal.refresh)
        with pytest.raises(HandshakeRefused):
            consumer.connector.connect(old)
        consumer.connector.connect(mortal.pool_for(name))
        assert consumer.pull(mortal) == ""


def test_an_idle_helper_uses_no_cpu(name: str, node: Node) -> None:
    with consuming(name) as consumer:
        consumer.connector.connect(node.pool_for(name))
        assert consumer.pull(node) == ""
        helpers = [helper_of(os.getpid()), helper_of(node.process.pid)]
        before = [sum(helper.cpu_times()[:2]) for helper in helpers]
        time.sleep(2.0)
        used_s = [sum(helper.cpu_times()[:2]) - start for helper, start in zip(helpers, before, strict=True)]
        # The clock ticks in 10 ms; a progress thread that polls takes half a core, which is 1 s here.
        assert max(used_s) < 0.025


def test_metadata_of_another_mesh_or_peer_is_refused(name: str, node: Node) -> None:
    with consuming(name) as consumer:
        pool = node.pool_for(name)
        tampered = pool.metadata[:-1] + bytes([pool.metadata[-1] ^ 1])
        for changes in ({"metadata": tampered}, {"metadata": b""}, {"peer_id": "other@1"}):
            fields = {name: getattr(pool, name) for name in ("peer_id", "metadata", "num_blocks", "block_bytes")}
            with pytest.raises(HandshakeRefused):
                consumer.connector.connect(type(pool)(**fields | changes))


def test_a_missing_package_names_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(NixlConnector, "transport", replace(NixlConnector.transport, packages=("no_such_package",)))
    assert importlib.util.find_spec("no_such_package") is None
    with pytest.raises(ConfigError, match=r"pip install 'pdmesh\[nixl\]'"):
        make_worker_connectors(["shm", "nixl"], peer_id="a@1", secret=MeshSecret(SECRET))


def test_a_helper_that_cannot_start_is_a_config_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UCX_TLS", "no-such-transport")
    connector = NixlConnector("consumer@1", MeshSecret(SECRET))
    pool = make_pool(SHAPE, filled=False)
    try:
        with pytest.raises(ConfigError, match="nixl"):
            connector.register(pool)
    finally:
        connector.close()
        pool.close()


def test_frames_survive_any_cut() -> None:
    messages = [PullEnded(transfer_id=f"t{index}", reason="x" * index, num_bytes=index) for index in range(20)]
    stream = b"".join(frame(message) for message in messages)
    for size in (1, 3, 7, len(stream)):
        frames = Frames()
        received = []
        for begin in range(0, len(stream), size):
            received += [from_helper_decoder.decode(body) for body in frames.feed(stream[begin : begin + size])]
        assert received == messages
