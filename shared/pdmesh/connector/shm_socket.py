"""How a pool's descriptor gets from its owner to a consumer on the same host, and nowhere else.

The owner listens on an abstract Unix socket (no file, so nothing is left behind by SIGKILL). Both ends check the other's
user id (SO_PEERCRED) and prove the mesh secret by a MAC over the other's fresh nonce. Then the owner passes a read-only
descriptor (SCM_RIGHTS) with the shape and the inode of its pool. Equal inodes are what proves that memory is really shared:
the consumer maps the very file the owner writes. The connection stays open; its end tells the consumer that the owner is gone.
All that is said on it afterwards are the offers that the consumer listens for, and the owner's notices of them.
"""

import array
import contextlib
import itertools
import logging
import os
import secrets
import select
import selectors
import socket
import struct
import threading
import time
from dataclasses import dataclass

import msgspec

from pdmesh.connector.notices import MAX_AWAITED, MAX_NOTICE_BYTES, OfferNotice
from pdmesh.connector.pages import PagesAhead
from pdmesh.connector.pool import KVPool, PoolShape, read_only_fd
from pdmesh.errors import HandshakeRefused
from pdmesh.security import MeshSecret

log = logging.getLogger(__name__)

NONCE_BYTES = 32
MAC_BYTES = 32
MAX_MESSAGE_BYTES = 4096
# Either end answers in microseconds. The consumer waits three times at most, and may block 5 s in all.
CONSUMER_TIMEOUT_S = 1.5
OWNER_TIMEOUT_S = 1.5
# Each costs the owner a descriptor; as many consumers as could come at once.
MAX_PENDING = 64
# Long enough for descriptors to be freed, short enough for a consumer's patience.
ACCEPT_PAUSE_S = 0.2
REFUSAL_LOG_INTERVAL_S = 10.0
CONSUMER_PURPOSE = "shm-consumer"
OWNER_PURPOSE = "shm-owner"


class _Grant(msgspec.Struct, frozen=True, kw_only=True):
    """What the owner says beside the descriptor."""

    num_blocks: int
    block_bytes: int
    device: int
    inode: int
    gives_notice: bool = False
    """Whether it may be told which offers the consumer listens for; an older release hangs up on whoever speaks."""


class _Listen(msgspec.Struct, frozen=True, kw_only=True):
    """What the consumer says afterwards."""

    offer_id: str


class PoolListener:
    """The owner's end: hands its pool out until closed. One thread, asleep but for connections coming and going and for what
    consumers say; `is_awaited`, `tell` and `forget` may be called from another.

    All handshakes run side by side, so that a silent connection delays no other.
    """

    def __init__(self, pool: KVPool, peer_id: str, secret: MeshSecret) -> None:
        self.socket_name = f"pdmesh-shm-{secrets.token_hex(16)}"
        self._pool_fd = read_only_fd(pool.fd)
        self._shape = pool.shape
        self._peer_id = peer_id
        self._secret = secret
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._socket.setblocking(False)
        self._socket.bind("\0" + self.socket_name)
        self._socket.listen(64)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._socket, selectors.EVENT_READ)
        self._stop_reader, self._stop_writer = socket.socketpair()
        self._selector.register(self._stop_reader, selectors.EVENT_READ)
        self._pending: dict[socket.socket, _Pending] = {}
        """Connections that have not proved themselves yet, oldest first."""
        self._accept_again_s: float | None = None
        """When to listen again after accepting failed; None while listening."""
        self._refusals = _RefusalLog()
        self._awaited: dict[str, socket.socket] = {}
        """Who listens for an offer, by its id, oldest first."""
        self._telling = threading.Lock()
        """Held where connections are told or closed, and where the table above changes."""
        self._thread = threading.Thread(target=self._serve, name="shm-owner", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop handing out and end all connections; consumers see their peer as lost."""
        self._stop_writer.send(b"\0")
        self._thread.join()
        for key in list(self._selector.get_map().values()):
            assert isinstance(key.fileobj, socket.socket)
            key.fileobj.close()
        self._selector.close()
        self._socket.close()
        self._stop_writer.close()
        os.close(self._pool_fd)

    def is_awaited(self, offer_id: str) -> bool:
        """Whether a consumer listens for an offer."""
        return offer_id in self._awaited

    def tell(self, notice: OfferNotice) -> None:
        """Tell who listens for an offer, if there is room for it; never blocks."""
        message = msgspec.msgpack.encode(notice)
        with self._telling:
            connection = self._awaited.pop(notice.offer_id, None)
            if connection is not None and len(message) <= MAX_NOTICE_BYTES:
                try:
                    connection.send(message)
                except OSError as exc:
                    log.debug("no notice of offer %s could be given: %s", notice.offer_id, exc)

    def forget(self, offer_id: str) -> None:
        """There will be no such offer."""
        with self._telling:
            self._awaited.pop(offer_id, None)

    def _serve(self) -> None:
        while True:
            for key, _ in self._selector.select(self._patience_s()):
                connection = key.fileobj
                assert isinstance(connection, socket.socket)
                if connection is self._stop_reader:
                    return
                if connection is self._socket:
                    self._accept()
                elif connection in self._pending:
                    self._answer(connection)
                elif connection.fileno() >= 0 and not self._hears(connection):
                    self._hang_up(connection)
            self._expire()

    def _hears(self, connection: socket.socket) -> bool:
        """Take in what a consumer says; False when it has hung up, or says what none would."""
        try:
            message = connection.recv(MAX_MESSAGE_BYTES)
            offer_id = msgspec.msgpack.decode(message, type=_Listen).offer_id if message else ""
        except (OSError, msgspec.MsgspecError):
            return False
        if not message:
            return False
        with self._telling:
            self._awaited[offer_id] = connection
            if len(self._awaited) > MAX_AWAITED:
                del self._awaited[next(iter(self._awaited))]
        return True

    def _patience_s(self) -> float | None:
        """How long nothing has to be done unless something arrives."""
        deadlines = [pending.deadline_s for pending in itertools.islice(self._pending.values(), 1)]
        if self._accept_again_s is not None:
            deadlines.append(self._accept_again_s)
        return max(min(deadlines) - time.monotonic(), 0.0) if deadlines else None

    def _expire(self) -> None:
        """Close who was silent for too long, and listen again after a pause."""
        now_s = time.monotonic()
        while self._pending:
            connection, pending = next(iter(self._pending.items()))
            if pending.deadline_s > now_s:
                break
            self._refuse(connection, f"it said nothing for {OWNER_TIMEOUT_S} s")
        if self._accept_again_s is not None and self._accept_again_s <= now_s:
            self._accept_again_s = None
            self._selector.register(self._socket, selectors.EVENT_READ)

    def _accept(self) -> None:
        try:
            connection, _ = self._socket.accept()
        except (BlockingIOError, ConnectionError):
            # It has hung up already.
            return
        except OSError as exc:
            # Such as no file descriptor left: it stays readable, and trying again at once would only spin.
            self._refusals.note(f"accepting failed: {exc}")
            self._selector.unregister(self._socket)
            self._accept_again_s = time.monotonic() + ACCEPT_PAUSE_S
            return
        try:
            _check_user(connection)
            connection.setblocking(False)
            pending = _Pending(secrets.token_bytes(NONCE_BYTES), time.monotonic() + OWNER_TIMEOUT_S)
            connection.send(pending.nonce)
            self._selector.register(connection, selectors.EVENT_READ)
        except (OSError, HandshakeRefused) as exc:
            self._refusals.note(str(exc))
            connection.close()
            return
        self._pending[connection] = pending
        if len(self._pending) > MAX_PENDING:
            # A consumer answers at once: the oldest is the least likely to be one.
            self._refuse(next(iter(self._pending)), "too many others came while it was silent")

    def _answer(self, connection: socket.socket) -> None:
        """Take in a pending connection's proof and hand the pool over."""
        try:
            self._grant(connection, self._pending[connection].nonce)
        except (OSError, HandshakeRefused) as exc:
            self._refuse(connection, str(exc))
        else:
            del self._pending[connection]

    def _refuse(self, connection: socket.socket, why: str) -> None:
        del self._pending[connection]
        self._hang_up(connection)
        self._refusals.note(why)

    def _hang_up(self, connection: socket.socket) -> None:
        self._selector.unregister(connection)
        with self._telling:
            for offer_id in [each for each, listener in self._awaited.items() if listener is connection]:
                del self._awaited[offer_id]
            connection.close()

    def _grant(self, connection: socket.socket, own_nonce: bytes) -> None:
        answer = connection.recv(MAX_MESSAGE_BYTES)
        mac, nonce = answer[:MAC_BYTES], answer[MAC_BYTES:]
        expected = own_nonce + nonce + self._peer_id.encode()
        if len(nonce) != NONCE_BYTES or not self._secret.check(CONSUMER_PURPOSE, expected, mac):
            raise HandshakeRefused("it has another mesh secret or looks for another engine")
        status = os.fstat(self._pool_fd)
        body = msgspec.msgpack.encode(
            _Grant(
                num_blocks=self._shape.num_blocks,
                block_bytes=self._shape.block_bytes,
                device=status.st_dev,
                inode=status.st_ino,
                gives_notice=True,
            )
        )
        message = self._secret.mac(OWNER_PURPOSE, nonce + body) + body
        rights = (socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [self._pool_fd]))
        connection.sendmsg([message], [rights])


@dataclass(frozen=True, slots=True)
class _Pending:
    """What the owner remembers of a connection until it has proved itself."""

    nonce: bytes
    deadline_s: float


class _RefusalLog:
    """Says that consumers were refused, but not once for each of a flood."""

    def __init__(self) -> None:
        self._quiet_until_s = 0.0
        self._num_unsaid = 0

    def note(self, why: str) -> None:
        now_s = time.monotonic()
        if now_s < self._quiet_until_s:
            self._num_unsaid += 1
            return
        unsaid = f" (and {self._num_unsaid} more before it)" if self._num_unsaid else ""
        log.warning("a consumer was refused the KV pool%s: %s", unsaid, why)
        self._quiet_until_s, self._num_unsaid = now_s + REFUSAL_LOG_INTERVAL_S, 0


class SharedPool:
    """The consumer's end: a peer's pool, mapped read-only, and the connection that tells whether the peer lives."""

    def __init__(self, pool: KVPool, connection: socket.socket, *, gives_notice: bool = False) -> None:
        self.pool = pool
        self.in_use = threading.Lock()
        """Held where it is read beside the thread that closes it, and where it is closed."""
        self._pages = PagesAhead(pool)
        self._noting = threading.Lock()
        self._connection = connection
        self._gives_notice = gives_notice
        connection.setblocking(False)

    def fileno(self) -> int:
        """Readable when `take_notice` has something, or when the owner has hung up."""
        return self._connection.fileno()

    def note(self, block_ids: list[int]) -> None:
        """Such blocks have been read: later ones are found faster from now on."""
        with self._noting:
            self._pages.note(block_ids)

    def await_offer(self, offer_id: str) -> None:
        """Listen for an offer of the owner's, if it gives notice and there is room to say so; never blocks."""
        if self._gives_notice:
            with contextlib.suppress(OSError):
                self._connection.send(msgspec.msgpack.encode(_Listen(offer_id=offer_id)))

    def take_notice(self) -> OfferNotice | None:
        """Return the next of what the owner has told, None when there is nothing more; never blocks. Raises EOFError when the
        owner has hung up, or says what none would.
        """
        try:
            message = self._connection.recv(MAX_NOTICE_BYTES)
            if message and (notice := msgspec.msgpack.decode(message, type=OfferNotice)).is_sound:
                return notice
        except BlockingIOError:
            return None
        except (OSError, msgspec.MsgspecError) as exc:
            raise EOFError(str(exc)) from exc
        raise EOFError("it has hung up" if not message else "it gives notice of an offer that cannot be")

    @property
    def owner_alive(self) -> bool:
        """Whether the owner still holds its end; never blocks."""
        # Reading would not tell where notices lie that nobody has taken yet.
        poll = select.poll()
        poll.register(self._connection, 0)
        return not poll.poll(0)

    def close(self) -> None:
        """Unmap and hang up."""
        self._pages.close()
        self.pool.close()
        self._connection.close()


def fetch_pool(socket_name: str, peer_id: str, shape: PoolShape, secret: MeshSecret) -> SharedPool:
    """Get and map the pool of `peer_id`. Blocks at most 4.5 s. Raises HandshakeRefused when it is not to be had."""
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    pool_fd = -1
    try:
        connection.settimeout(CONSUMER_TIMEOUT_S)
        connection.connect("\0" + socket_name)
        _check_user(connection)
        grant, pool_fd = _ask(connection, peer_id, secret)
        if PoolShape(grant.num_blocks, grant.block_bytes) != shape:
            raise HandshakeRefused(
                f"the pool of {peer_id} has {grant.num_blocks} blocks of {grant.block_bytes} bytes, "
                f"not {shape.num_blocks} of {shape.block_bytes}"
            )
        status = os.fstat(pool_fd)
        if (status.st_dev, status.st_ino, status.st_size) != (grant.device, grant.inode, shape.total_bytes):
            raise HandshakeRefused(f"what {peer_id} passed is not the memory it writes")
        pool = KVPool(pool_fd, shape, writable=False)
        return SharedPool(pool, connection, gives_notice=grant.gives_notice)
    except (OSError, HandshakeRefused) as exc:
        connection.close()
        if isinstance(exc, HandshakeRefused):
            raise
        raise HandshakeRefused(f"the memory of {peer_id} cannot be shared from here: {exc}") from exc
    finally:
        if pool_fd >= 0:
            os.close(pool_fd)


def _ask(connection: socket.socket, peer_id: str, secret: MeshSecret) -> tuple[_Grant, int]:
    """Run the consumer's side of the exchange; the caller closes the descriptor."""
    owner_nonce = connection.recv(MAX_MESSAGE_BYTES)
    nonce = secrets.token_bytes(NONCE_BYTES)
    connection.send(secret.mac(CONSUMER_PURPOSE, owner_nonce + nonce + peer_id.encode()) + nonce)
    message, fds, _, _ = socket.recv_fds(connection, MAX_MESSAGE_BYTES, 1, socket.MSG_CMSG_CLOEXEC)
    with contextlib.ExitStack() as on_failure:
        for fd in fds:
            on_failure.callback(os.close, fd)
        if not message:
            raise HandshakeRefused(f"{peer_id} refused to share memory: its mesh secret or its identity differs")
        mac, body = message[:MAC_BYTES], message[MAC_BYTES:]
        if not secret.check(OWNER_PURPOSE, nonce + body, mac) or len(fds) != 1:
            raise HandshakeRefused(f"{peer_id} did not prove that it belongs to this mesh")
        try:
            grant = msgspec.msgpack.decode(body, type=_Grant)
        except msgspec.MsgspecError as exc:
            raise HandshakeRefused(f"{peer_id} describes its pool in a way this release cannot read: {exc}") from exc
        on_failure.pop_all()
        return grant, fds[0]


def _check_user(connection: socket.socket) -> None:
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    _, user, _ = struct.unpack("3i", credentials)
    if user != os.geteuid():
        raise HandshakeRefused(f"the other end runs as user {user}, this one as {os.geteuid()}")
