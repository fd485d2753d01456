"""What owners tell consumers over shm, and what the liars and the silent among them cannot do."""

from __future__ import annotations

import array
import contextlib
import os
import select
import socket
import threading
import time
from collections.abc import Callable, Iterator

import msgspec
import pytest

from pdmesh.connector.base import PeerPool, Pull
from pdmesh.connector.notices import MAX_NOTICE_BYTES, OfferNotice
from pdmesh.connector.pool import PoolShape, read_only_fd
from pdmesh.connector.shm import ShmConnector, ShmMetadata
from pdmesh.connector.shm_socket import (
    CONSUMER_PURPOSE,
    MAC_BYTES,
    MAX_MESSAGE_BYTES,
    NONCE_BYTES,
    OWNER_PURPOSE,
    PoolListener,
    SharedPool,
    fetch_pool,
)
from pdmesh.protocol.messages import GroupBlocks
from pdmesh.security import MeshSecret
from support.pool_node import SECRET, make_pool, wait_for

SHAPE = PoolShape(num_blocks=4, block_bytes=4096)
MESH = MeshSecret(SECRET)
GRACE_S = 10.0


class End:
    """A connector with its pool."""

    def __init__(self, peer_id: str) -> None:
        self.peer_id = peer_id
        self.pool = make_pool(SHAPE, filled=True)
        self.shm = ShmConnector(peer_id, MESH)
        self.metadata = self.shm.register(self.pool)

    @property
    def listener(self) -> PoolListener:
        assert self.shm._listener is not None
        return self.shm._listener

    def connect(self, owner: End | RawOwner) -> None:
        self.shm.connect(
            PeerPool(
                peer_id=owner.peer_id,
                metadata=owner.metadata,
                num_blocks=SHAPE.num_blocks,
                block_bytes=SHAPE.block_bytes,
            )
        )

    def listen(self, owner: End, offer_id: str) -> None:
        """Listen, and wait until the owner knows."""
        self.shm.await_offer(owner.peer_id, offer_id)
        eventually(lambda: owner.shm.is_awaited(offer_id))

    @property
    def has_something(self) -> bool:
        return bool(select.select([self.shm.fileno()], [], [], 0)[0])

    def pull(self, owner: End | RawOwner) -> str:
        """Pull a block; the reason with which it ended."""
        self.shm.start(
            Pull(
                transfer_id=f"t{time.monotonic_ns()}",
                peer_id=owner.peer_id,
                source_block_ids=[1],
                generations=owner.pool.generations_of([1]),
                target_block_ids=[2],
                deadline_s=GRACE_S,
            )
        )
        [result] = wait_for(self.shm, 1, GRACE_S)
        return result.reason

    def close(self) -> None:
        self.shm.close()
        self.pool.close()


class RawOwner:
    """Shares a pool as a `PoolListener` does with one consumer, and says then what a test wants."""

    def __init__(self, **grant: object) -> None:
        self.peer_id = "raw@1"
        self.pool = make_pool(SHAPE, filled=True)
        self._grant = grant
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._socket.settimeout(GRACE_S)
        name = f"pdmesh-raw-{os.urandom(8).hex()}"
        self._socket.bind("\0" + name)
        self._socket.listen()
        self.metadata = msgspec.msgpack.encode(ShmMetadata(socket_name=name))
        self.connection: socket.socket
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def _serve(self) -> None:
        self.connection, _ = self._socket.accept()
        self.connection.settimeout(GRACE_S)
        own_nonce = os.urandom(NONCE_BYTES)
        self.connection.send(own_nonce)
        answer = self.connection.recv(MAX_MESSAGE_BYTES)
        nonce = answer[MAC_BYTES:]
        assert MESH.check(CONSUMER_PURPOSE, own_nonce + nonce + self.peer_id.encode(), answer[:MAC_BYTES])
        fd = read_only_fd(self.pool.fd)
        status = os.fstat(fd)
        shape = {"num_blocks": SHAPE.num_blocks, "block_bytes": SHAPE.block_bytes}
        body = msgspec.msgpack.encode(shape | {"device": status.st_dev, "inode": status.st_ino} | self._grant)
        rights = (socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [fd]))
        self.connection.sendmsg([MESH.mac(OWNER_PURPOSE, nonce + body) + body], [rights])
        os.close(fd)

    def close(self) -> None:
        self._thread.join(GRACE_S)
        self.connection.close()
        self._socket.close()
        self.pool.close()


def eventually(holds: Callable[[], bool]) -> None:
    """Wait for what another thread does."""
    end_s = time.monotonic() + GRACE_S
    while not holds():
        assert time.monotonic() < end_s, "it did not come to be"
        time.sleep(0.001)


def in_time(work: Callable[[], None]) -> None:
    """Do what must not block; the test goes on and fails when it does."""
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    thread.join(GRACE_S)
    assert not thread.is_alive(), "it blocks"


def notice(offer_id: str = "offer", **changes: object) -> OfferNotice:
    groups = [GroupBlocks(group=0, block_ids=[1, 3], generations=[5, 6], checksums=[7, 8])]
    made = OfferNotice(offer_id=offer_id, groups=groups, num_tokens=20, first_tokens=[9])
    return msgspec.structs.replace(made, **changes)


def notice_of(num_bytes: int, offer_id: str = "offer") -> OfferNotice:
    """One that takes as many bytes as it is sent."""
    num_tokens = num_bytes - len(msgspec.msgpack.encode(notice(offer_id, first_tokens=[1] * (1 << 16)))) + (1 << 16)
    made = notice(offer_id, first_tokens=[1] * num_tokens)
    # Of a shorter list its head is two bytes shorter.
    made = notice(offer_id, first_tokens=[1] * (num_tokens + num_bytes - len(msgspec.msgpack.encode(made))))
    assert len(msgspec.msgpack.encode(made)) == num_bytes
    return made


@pytest.fixture
def ends() -> Iterator[tuple[End, End, End]]:
    """An owner and two consumers."""
    with contextlib.ExitStack() as stack:
        made = End("p@1"), End("d@1"), End("d@2")
        for end in made:
            stack.callback(end.close)
        for end in made[1:]:
            end.connect(made[0])
        yield made


@pytest.fixture
def raw_owner() -> Iterator[RawOwner]:
    made = RawOwner(gives_notice=True)
    yield made
    made.close()


@pytest.fixture
def raw_consumer(ends: tuple[End, End, End]) -> Iterator[SharedPool]:
    name = ends[0].listener.socket_name
    made = fetch_pool(name, "p@1", SHAPE, MESH)
    yield made
    made.close()


@pytest.fixture
def deaf(raw_owner: RawOwner) -> Iterator[End]:
    """A consumer of an owner that says anything, or nothing."""
    made = End("d@1")
    made.connect(raw_owner)
    yield made
    made.close()


def test_who_listens_is_told_once_and_nobody_else(ends: tuple[End, End, End]) -> None:
    owner, consumer, other = ends
    other.listen(owner, "another")
    consumer.listen(owner, "offer")
    assert not consumer.has_something
    owner.shm.tell(notice())
    assert consumer.has_something
    assert not other.has_something
    assert consumer.shm.take_notices() == [("p@1", notice())]
    assert not consumer.has_something
    assert consumer.shm.take_notices() == []
    assert not owner.shm.is_awaited("offer")
    owner.shm.tell(notice())
    assert not consumer.has_something
    assert list(owner.listener._awaited) == ["another"]


def test_notices_come_in_order_and_beside_the_ends_of_pulls(ends: tuple[End, End, End]) -> None:
    owner, consumer, _ = ends
    for offer_id in ("a", "b"):
        consumer.listen(owner, offer_id)
        owner.shm.tell(notice(offer_id))
    assert consumer.pull(owner) == ""
    assert [told.offer_id for _, told in consumer.shm.take_notices()] == ["a", "b"]
    assert not consumer.has_something


def test_of_an_offer_that_is_taken_back_nothing_is_told(ends: tuple[End, End, End]) -> None:
    owner, consumer, _ = ends
    consumer.listen(owner, "offer")
    owner.shm.retract("offer")
    owner.shm.retract("unknown")
    assert owner.listener._awaited == {}
    owner.shm.tell(notice())
    assert not consumer.has_something


def test_of_a_consumer_that_has_gone_nothing_is_kept(ends: tuple[End, End, End]) -> None:
    owner, consumer, other = ends
    other.listen(owner, "another")
    for offer_id in ("a", "b"):
        consumer.listen(owner, offer_id)
    consumer.shm.disconnect("p@1")
    eventually(lambda: list(owner.listener._awaited) == ["another"])
    owner.shm.tell(notice("a"))
    owner.shm.tell(notice("another"))
    assert other.shm.take_notices() == [("p@1", notice("another"))]


def test_a_consumer_may_go_while_it_is_told(ends: tuple[End, End, End]) -> None:
    owner, _, _ = ends
    gone, own = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with own:
        # As in the moment before the owner's thread notices.
        owner.listener._awaited["offer"] = own
        gone.close()
        owner.shm.tell(notice())
    assert owner.listener._awaited == {}


def test_who_listens_to_nobody_that_is_connected_hears_nothing(ends: tuple[End, End, End]) -> None:
    owner, consumer, _ = ends
    consumer.shm.disconnect("p@1")
    consumer.shm.await_offer("p@1", "offer")
    assert not consumer.has_something
    assert consumer.shm.take_notices() == []
    assert owner.listener._awaited == {}


def test_a_peer_that_is_connected_anew_is_heard_over_the_new_connection(ends: tuple[End, End, End]) -> None:
    owner, consumer, _ = ends
    consumer.listen(owner, "old")
    consumer.connect(owner)
    eventually(lambda: owner.listener._awaited == {})
    consumer.listen(owner, "offer")
    owner.shm.tell(notice("old"))
    owner.shm.tell(notice())
    assert consumer.shm.take_notices() == [("p@1", notice())]
    consumer.shm.disconnect("p@1")
    assert not consumer.has_something
    consumer.connect(owner)
    consumer.listen(owner, "again")
    owner.shm.tell(notice("again"))
    assert consumer.shm.take_notices() == [("p@1", notice("again"))]


def test_what_a_peer_told_before_it_was_let_go_wakes_nobody(
    ends: tuple[End, End, End], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its connection stays as long as something is copied."""
    owner, consumer, _ = ends
    consumer.listen(owner, "offer")
    owner.shm.tell(notice())
    with monkeypatch.context() as patch:
        kept: list[SharedPool] = []
        patch.setattr(SharedPool, "close", lambda shared: kept.append(shared))
        consumer.shm.disconnect("p@1")
        assert not consumer.has_something
        assert consumer.shm.take_notices() == []
        eventually(lambda: bool(kept))
    kept[0].close()


def test_a_peer_that_is_let_go_meanwhile_is_heard_no_more(
    ends: tuple[End, End, End], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Connecting a peer anew, in a thread of its own, lets the old connection go: that ended the core's loop."""
    owner, consumer, _ = ends
    take_notice = SharedPool.take_notice

    def late(shared: SharedPool) -> OfferNotice | None:
        shared._connection.close()
        return take_notice(shared)

    consumer.listen(owner, "offer")
    owner.shm.tell(notice())
    monkeypatch.setattr(SharedPool, "take_notice", late)
    assert consumer.shm.take_notices() == []


def test_what_an_owner_told_before_it_hung_up_is_heard(ends: tuple[End, End, End]) -> None:
    owner, consumer, _ = ends
    consumer.listen(owner, "offer")
    owner.shm.tell(notice())
    owner.listener.close()
    owner.shm._listener = None
    assert consumer.has_something
    assert consumer.shm.take_notices() == [("p@1", notice())]
    assert not consumer.has_something
    assert consumer.pull(owner) == "peer_lost"
    assert not consumer.has_something
    consumer.shm.await_offer("p@1", "next")
    assert consumer.shm.take_notices() == []


def test_an_owner_is_lost_although_what_it_told_is_not_read_yet(ends: tuple[End, End, End]) -> None:
    """What lay there to be read passed for an owner that lives."""
    owner, consumer, _ = ends
    consumer.listen(owner, "offer")
    owner.shm.tell(notice())
    owner.listener.close()
    owner.shm._listener = None
    assert consumer.pull(owner) == "peer_lost"


UNSOUND = {
    "garbage": b"\xc1garbage",
    "empty": b"",
    "other message": msgspec.msgpack.encode({"offer_id": "offer"}),
    "too long": msgspec.msgpack.encode(notice_of(MAX_NOTICE_BYTES + 1)),
    "no tokens": msgspec.msgpack.encode(notice(num_tokens=0)),
    "no first token": msgspec.msgpack.encode(notice(first_tokens=[])),
    "negative block": msgspec.msgpack.encode(notice(groups=[GroupBlocks(group=0, block_ids=[-1], generations=[1])])),
    "fewer generations": msgspec.msgpack.encode(
        notice(groups=[GroupBlocks(group=0, block_ids=[1, 2], generations=[1])])
    ),
    "fewer sums": msgspec.msgpack.encode(
        notice(groups=[GroupBlocks(group=0, block_ids=[1, 2], generations=[1, 1], checksums=[1])])
    ),
}


@pytest.mark.parametrize("said", UNSOUND.values(), ids=UNSOUND)
def test_an_owner_that_says_what_none_would_is_heard_no_more(raw_owner: RawOwner, deaf: End, said: bytes) -> None:
    sound = msgspec.msgpack.encode(notice())
    raw_owner.connection.send(sound)
    raw_owner.connection.send(said)
    assert deaf.shm.take_notices() == [("raw@1", notice())]
    # The core would spin on it.
    assert not deaf.has_something
    raw_owner.connection.send(sound)
    assert not deaf.has_something
    assert deaf.shm.take_notices() == []
    assert deaf.pull(raw_owner) == ""
    deaf.shm.await_offer("raw@1", "offer")
    raw_owner.connection.close()
    assert not deaf.has_something
    assert deaf.pull(raw_owner) == "peer_lost"
    deaf.shm.disconnect("raw@1")


@pytest.mark.parametrize(
    "said",
    [b"\xc1garbage", b"", msgspec.msgpack.encode({"offer": "x"}), msgspec.msgpack.encode({"offer_id": "x" * 5000})],
)
def test_a_consumer_that_says_what_none_would_is_hung_up_on(
    ends: tuple[End, End, End], raw_consumer: SharedPool, said: bytes
) -> None:
    owner, consumer, _ = ends
    consumer.listen(owner, "offer")
    raw_consumer.await_offer("its own")
    eventually(lambda: owner.shm.is_awaited("its own"))
    raw_consumer._connection.send(said)
    eventually(lambda: not raw_consumer.owner_alive)
    assert list(owner.listener._awaited) == ["offer"]
    owner.shm.tell(notice())
    assert consumer.shm.take_notices() == [("p@1", notice())]
    assert consumer.pull(owner) == ""


def test_the_oldest_of_too_many_are_forgotten(ends: tuple[End, End, End], monkeypatch: pytest.MonkeyPatch) -> None:
    owner, consumer, _ = ends
    monkeypatch.setattr("pdmesh.connector.shm_socket.MAX_AWAITED", 3)
    for offer_id in "abcd":
        consumer.shm.await_offer("p@1", offer_id)
    consumer.listen(owner, "e")
    assert list(owner.listener._awaited) == ["c", "d", "e"]
    owner.shm.tell(notice("b"))
    owner.shm.tell(notice("c"))
    assert consumer.shm.take_notices() == [("p@1", notice("c"))]


def test_the_longest_notice_is_told_whole_and_a_longer_one_is_not(ends: tuple[End, End, End]) -> None:
    owner, consumer, _ = ends
    longest, longer = notice_of(MAX_NOTICE_BYTES), notice_of(MAX_NOTICE_BYTES + 1, "longer")
    for offer_id in ("longer", "offer"):
        consumer.listen(owner, offer_id)
    owner.shm.tell(longer)
    assert not consumer.has_something
    assert not owner.shm.is_awaited("longer")
    owner.shm.tell(longest)
    assert consumer.shm.take_notices() == [("p@1", longest)]


def test_an_owner_of_an_older_release_is_not_spoken_to() -> None:
    """It hangs up on whoever speaks."""
    owner, consumer = RawOwner(), End("d@1")
    consumer.connect(owner)
    consumer.shm.await_offer("raw@1", "offer")
    assert not select.select([owner.connection], [], [], 0)[0]
    assert consumer.pull(owner) == ""
    consumer.close()
    owner.close()


def test_a_consumer_that_never_reads_holds_nobody_up(ends: tuple[End, End, End], raw_consumer: SharedPool) -> None:
    owner, consumer, _ = ends
    notices = [notice_of(MAX_NOTICE_BYTES, f"offer {number}") for number in range(12)]
    for each in notices:
        raw_consumer.await_offer(each.offer_id)
        eventually(lambda each=each: owner.shm.is_awaited(each.offer_id))
        in_time(lambda each=each: owner.shm.tell(each))
    assert owner.listener._awaited == {}
    consumer.listen(owner, "offer")
    owner.shm.tell(notice())
    assert consumer.shm.take_notices() == [("p@1", notice())]
    heard = []
    while (each := raw_consumer.take_notice()) is not None:
        heard.append(each)
    assert 0 < len(heard) < len(notices)
    assert heard == notices[: len(heard)]
    # There is room again.
    raw_consumer.await_offer("offer")
    eventually(lambda: owner.shm.is_awaited("offer"))
    owner.shm.tell(notice())
    assert raw_consumer.take_notice() == notice()


def test_an_owner_that_never_reads_holds_nobody_up(raw_owner: RawOwner, deaf: End) -> None:
    in_time(lambda: [deaf.shm.await_offer("raw@1", "x" * 4000) for _ in range(500)] and None)
    assert deaf.pull(raw_owner) == ""
