"""The engine's side of a native transport's helper process: starts it, talks to it, replaces it when it dies, and is its fence.

One thread does all the socket's I/O, so that no call of the engine's loop waits for the helper. When a pull should have
ended and the helper does not say that its read has, the helper is killed: no dead process writes to a block.
"""

import contextlib
import itertools
import logging
import os
import secrets
import selectors
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future

import msgspec

from pdmesh.connector.active import ActivePulls, error_reason
from pdmesh.connector.base import Pull, Push
from pdmesh.connector.grave import Grave
from pdmesh.connector.native_agent import Transport
from pdmesh.connector.native_messages import (
    AgentConnected,
    ConnectAgent,
    DisconnectAgent,
    Frames,
    HelperFailed,
    HelperReady,
    PullEnded,
    Setup,
    StartPull,
    StartPush,
    ToHelper,
    frame,
    from_helper_decoder,
)
from pdmesh.connector.options import NativeOptions
from pdmesh.connector.pool import KVPool
from pdmesh.errors import HandshakeRefused
from pdmesh.parent import tied_command

log = logging.getLogger(__name__)

# Importing a library and opening its devices takes a second; a busy machine many.
READY_TIMEOUT_S = 30.0
CONNECT_TIMEOUT_S = 4.5
BACKOFF_MIN_S = 0.2
BACKOFF_MAX_S = 10.0
# A write of another process into a dead one's memory is a copy that is under way.
BURIAL_TIMEOUT_S = 10.0
# A helper that lived this long starts the next one without waiting longer than the minimum.
STABLE_S = 10.0


class NativeHelper:
    """A supervised helper process over one pool. Everything but `run`'s internals is for the engine's thread."""

    def __init__(
        self,
        transport: Transport,
        pool: KVPool,
        peer_id: str,
        pulls: ActivePulls,
        options: NativeOptions,
        *,
        on_loopback: bool,
    ) -> None:
        self._transport = transport
        self._options = options
        self._on_loopback = on_loopback
        self._pool = pool
        self._peer_id = peer_id
        self._pulls = pulls
        self._lock = threading.Lock()
        self._outbox: deque[ToHelper] = deque()
        self._unsent = b""
        """Of orders that were taken from there."""
        self._direct: socket.socket | None = None
        """Where an order may go at once, because nothing waits before it."""
        self._connecting: dict[int, Future[str]] = {}
        """By order."""
        self._orders = itertools.count(1)
        self._ready: Future[HelperReady] = Future()
        self._connected: dict[str, ConnectAgent] = {}
        """Peers to connect again when the process has to be started anew: their side of it still stands."""
        self._on_restarted: Callable[[HelperReady], None] | None = None
        self._graves: list[Grave] = []
        """Of processes into whose memory somebody may still write; the last is that of the one that lives."""
        self._shutting_out: list[Callable[[], None]] = []
        """Who waits for that to be over."""
        self._closing = False
        self._wake_fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        # The process dies with the thread that starts it, so that thread lives as long as this object.
        self._thread = threading.Thread(target=self._run, name=f"{transport.name}-helper", daemon=True)
        self._thread.start()

    def ready(self) -> HelperReady:
        """Wait for the first start. Raises RuntimeError with the library's own words when it cannot."""
        return self._ready.result(READY_TIMEOUT_S)

    def watch(self, on_restarted: Callable[[HelperReady], None]) -> None:
        """Call back, in the helper's thread, with what peers need to know after each restart."""
        self._on_restarted = on_restarted

    def send(self, message: ToHelper) -> None:
        """Pass an order on, without the thread where that can be: to wake it takes a tenth of a millisecond. Never blocks."""
        with self._lock:
            if self._direct is None or not self._is_sent(self._direct, message):
                self._outbox.append(message)
        self.wake()

    def connect(self, message: ConnectAgent) -> None:
        """Connect to a peer's agent; blocks at most 4.5 s. Raises HandshakeRefused."""
        answer: Future[str] = Future()
        order = msgspec.structs.replace(message, order=next(self._orders))
        with self._lock:
            self._connecting[order.order] = answer
        self.send(order)
        try:
            error = answer.result(CONNECT_TIMEOUT_S)
        except TimeoutError:
            error = f"no answer within {CONNECT_TIMEOUT_S} s"
            self._answer(order.order, error)
            # It may be connected yet, and nobody would know of it to let it go.
            self.disconnect(message.peer_id)
        if error:
            raise HandshakeRefused(f"{self._transport.title} cannot reach {message.peer_id}: {error}")
        self._connected[message.peer_id] = message

    def disconnect(self, peer_id: str) -> None:
        """Close the connection to a peer; never blocks."""
        self._connected.pop(peer_id, None)
        self.send(DisconnectAgent(peer_id=peer_id))

    def shut_out(self, on_done: Callable[[], None]) -> None:
        """Replace the process, so that nobody can write into the pool by what is known of this one; `on_done` is called, in the
        helper's thread, when it is so. Never blocks."""
        with self._lock:
            self._shutting_out.append(on_done)
        self.wake()

    def wake(self) -> None:
        """Make the thread look at the outbox and at the pulls' fences."""
        os.eventfd_write(self._wake_fd, 1)

    def close(self) -> None:
        """Kill the process and end all pulls."""
        self._closing = True
        self.wake()
        self._thread.join()
        os.close(self._wake_fd)

    def _run(self) -> None:
        """Keep a helper alive until closed."""
        backoff_s = BACKOFF_MIN_S
        while not self._closing:
            started_s = time.monotonic()
            try:
                why = self._live()
            except Exception as exc:  # the thread's top
                log.exception("the %s helper process cannot be run", self._transport.title)
                why = str(exc)
            self._fail_all(why)
            self._bury()
            if self._closing or not self._ready.done() or self._ready.exception() is not None:
                break
            backoff_s = BACKOFF_MIN_S if time.monotonic() - started_s > STABLE_S else min(2 * backoff_s, BACKOFF_MAX_S)
            log.warning(
                "the %s helper process ended (%s); starting another in %.1f s", self._transport.title, why, backoff_s
            )
            self._sleep(backoff_s)
        if not self._ready.done():
            self._ready.set_exception(RuntimeError("closed before it was ready"))
        for grave in self._graves:
            grave.close()

    def _bury(self) -> None:
        """See that nobody writes into the memory of dead processes any more, and tell those who wait for that."""
        for grave in list(self._graves):
            if grave.is_closed(0.0 if self._closing else BURIAL_TIMEOUT_S):
                grave.close()
                self._graves.remove(grave)
        if self._graves:
            if not self._closing:
                log.error("a peer does not end a write into the memory of a dead %s helper", self._transport.title)
            return
        with self._lock:
            waiting, self._shutting_out = self._shutting_out, []
        for on_done in waiting:
            on_done()

    def _live(self) -> str:
        """Run one process from start to end; says why it ended. It is dead when this returns."""
        ours, theirs = socket.socketpair()
        with ours, contextlib.ExitStack() as stack:
            self._graves.append(grave := Grave())
            with theirs:
                process = self._spawn(theirs, grave)
            stack.callback(_kill, process)
            stack.callback(self._hang_up)
            with self._lock:
                # A life begins with its set-up and the peers of the one before, whatever was queued meanwhile.
                first: list[ToHelper] = [self._setup(), *self._connected.values()]
                self._outbox.extendleft(reversed(first))
            why = self._converse(ours, process)
            _kill(process)
            return why

    def _hang_up(self) -> None:
        """What was meant for the process that ends is not for the next."""
        with self._lock:
            self._direct, self._unsent = None, b""

    def _spawn(self, theirs: socket.socket, grave: Grave) -> "subprocess.Popen[bytes]":
        staging = self._pool.staging
        descriptors = [theirs.fileno(), grave.fd, self._pool.fd, *([] if staging is None else [staging.fd])]
        transport = self._transport
        environment = transport.environment | (transport.loopback_environment if self._on_loopback else {})
        return subprocess.Popen(
            tied_command("pdmesh.connector.native_process", *map(str, descriptors)),
            pass_fds=descriptors,
            env=environment | dict(os.environ) | self._options.variables,
            stdin=subprocess.DEVNULL,
            stdout=sys.__stderr__.fileno() if sys.__stderr__ is not None else subprocess.DEVNULL,
        )

    def _setup(self) -> Setup:
        shape = self._pool.shape
        # Peers tell agents apart by name: each life has its own.
        name = f"{self._peer_id}/{secrets.token_hex(4)}"
        return Setup(
            transport=self._transport.name,
            agent_name=name,
            on_loopback=self._on_loopback,
            num_blocks=shape.num_blocks,
            block_bytes=shape.block_bytes,
            lane_bytes=0 if self._pool.staging is None else self._pool.staging.lane_bytes,
            num_threads=self._options.agent_threads,
            host=self._options.agent_host,
            throttle_bytes_s=self._options.throttle_bytes_s,
        )

    def _converse(self, connection: socket.socket, process: "subprocess.Popen[bytes]") -> str:
        connection.setblocking(False)
        frames = Frames()
        with selectors.DefaultSelector() as selector:
            selector.register(self._wake_fd, selectors.EVENT_READ)
            selector.register(connection, selectors.EVENT_READ)
            while not self._closing:
                with self._lock:
                    if self._shutting_out:
                        return "peers may have written through it after they should, so it was killed"
                    self._unsent += b"".join(frame(order) for order in self._outbox if self._is_wanted(order))
                    self._outbox.clear()
                    self._direct = None if self._unsent else connection
                    interest = selectors.EVENT_READ | (selectors.EVENT_WRITE if self._unsent else 0)
                selector.modify(connection, interest)
                fence_s = min((active.fence_s for active in self._pulls.all()), default=None)
                now = time.monotonic()
                if fence_s is not None and fence_s <= now:
                    return "a read did not end in time, so it was killed"
                for key, events in selector.select(None if fence_s is None else fence_s - now):
                    if key.fd == self._wake_fd:
                        with contextlib.suppress(BlockingIOError):
                            os.eventfd_read(self._wake_fd)
                        continue
                    try:
                        if events & selectors.EVENT_WRITE:
                            with self._lock:
                                self._unsent = self._unsent[connection.send(self._unsent) :]
                        if events & selectors.EVENT_READ:
                            data = connection.recv(1 << 16)
                            if not data:
                                return f"it ended with code {process.wait()}"
                            for body in frames.feed(data):
                                self._hear(body)
                    except BlockingIOError:
                        continue
                    except OSError:
                        return f"it ended with code {process.wait()}"
        return "closed"

    def _is_sent(self, connection: socket.socket, order: ToHelper) -> bool:
        """Whether an order has gone, or is not to go any more; under the lock."""
        if not self._is_wanted(order):
            return True
        data = frame(order)
        try:
            num_sent = connection.send(data)
        except OSError:
            # The thread will find out what is wrong.
            self._direct = None
            return False
        if num_sent < len(data):
            self._unsent, self._direct = data[num_sent:], None
        return True

    def _is_wanted(self, order: ToHelper) -> bool:
        """Whether an order is still to be carried out. What was queued while the life before ended may have been ended with it,
        and its blocks be another's by now."""
        return not isinstance(order, StartPull | StartPush) or self._pulls.get(order.transfer_id) is not None

    def _hear(self, body: bytes) -> None:
        message = from_helper_decoder.decode(body)
        match message:
            case PullEnded():
                self._end(message)
            case AgentConnected():
                self._answer(message.order, message.error)
            case HelperReady():
                if not self._ready.done():
                    self._ready.set_result(message)
                    return
                if self._on_restarted is not None:
                    self._on_restarted(message)
            case HelperFailed():
                log.error("%s cannot be used: %s", self._transport.title, message.message)
                if not self._ready.done():
                    self._ready.set_exception(RuntimeError(message.message))

    def _end(self, message: PullEnded) -> None:
        """End a pull or a write; a pull that may still write here ends with the process, which is killed at once."""
        active = self._pulls.get(message.transfer_id)
        if message.may_write and active is not None and isinstance(active.pull, Pull):
            log.warning("a read over %s may go on after it failed: %s", self._transport.title, message.reason)
            active.fence_s = time.monotonic()
            return
        self._pulls.finish(message.transfer_id, message.reason, message.num_bytes, may_write=message.may_write)

    def _answer(self, order: int, error: str) -> None:
        with self._lock:
            answer = self._connecting.pop(order, None)
        if answer is not None:
            answer.set_result(error)

    def _fail_all(self, why: str) -> None:
        """End what the dead process was doing."""
        with self._lock:
            self._outbox.clear()
            connecting = list(self._connecting)
        for order in connecting:
            self._answer(order, f"the helper process is gone: {why}")
        for active in self._pulls.all():
            reason = active.interruption() or error_reason(f"the {self._transport.title} helper process is gone: {why}")
            self._pulls.finish(active.pull.transfer_id, reason, may_write=isinstance(active.pull, Push))
        if not self._ready.done():
            self._ready.set_exception(RuntimeError(why))

    def _sleep(self, seconds: float) -> None:
        """Wait, but not longer than until `close`."""
        end_s = time.monotonic() + seconds
        with selectors.DefaultSelector() as selector:
            selector.register(self._wake_fd, selectors.EVENT_READ)
            while not self._closing and (left_s := end_s - time.monotonic()) > 0:
                if selector.select(left_s):
                    os.eventfd_read(self._wake_fd)
                    # There is no process now.
                    self._bury()


def _kill(process: "subprocess.Popen[bytes]") -> None:
    process.kill()
    process.wait()
