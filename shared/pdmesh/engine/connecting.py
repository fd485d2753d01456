"""Connects peers aside, because it may take seconds: one peer's orders in turn, and no peer waits for another that hangs.

Threads are there while there is something to connect. The answers come one for each order, whatever becomes of it.
"""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from pdmesh.connector.base import PeerPool, WorkerConnector
from pdmesh.engine.attachments import Attachments
from pdmesh.engine.messages import ConnectPeer
from pdmesh.errors import MeshError

log = logging.getLogger(__name__)

# Each may hang for 5 s; a native helper can tell so many handshakes apart.
MAX_THREADS = 16
# A connect that hangs longer is left to end with the process.
CLOSE_GRACE_S = 1.0


@dataclass(frozen=True, slots=True, eq=False)
class Connected:
    """The end of an order."""

    order: ConnectPeer
    error: str
    """Empty: the peer is connected."""


class Connecting:
    """The threads. Its methods are the loop's, and but for the last never wait; `tell` is called in a thread, or at once."""

    def __init__(
        self,
        connectors: Mapping[str, WorkerConnector],
        attachments: Attachments,
        tell: Callable[[Connected], None],
        *,
        has_staging: bool,
    ) -> None:
        self._connectors = connectors
        self._attachments = attachments
        self._tell = tell
        self._has_staging = has_staging
        self._lock = threading.Lock()
        self._orders: dict[str, deque[ConnectPeer]] = {}
        """By peer, until they have ended; the first of each is under way, or will be soon."""
        self._due: deque[str] = deque()
        """Peers with orders that no thread is at."""
        self._threads: set[threading.Thread] = set()
        self._is_stopping = False

    def order(self, order: ConnectPeer) -> None:
        """Have a peer connected when its earlier orders have ended."""
        with self._lock:
            orders = self._orders.setdefault(order.peer_id, deque())
            orders.append(order)
            if len(orders) > 1:
                return
            self._due.append(order.peer_id)
            if len(self._threads) >= MAX_THREADS:
                return
            # A daemon: a peer that hangs in connect must not keep the process alive.
            thread = threading.Thread(target=self._work, name="connect", daemon=True)
            try:
                thread.start()
            except RuntimeError as exc:
                if self._threads:
                    # One of them will come to it.
                    return
                self._due.remove(order.peer_id)
                del self._orders[order.peer_id]
                error = str(exc)
            else:
                self._threads.add(thread)
                return
        self._tell(Connected(order, error))

    def stop(self) -> None:
        """Begin nothing more."""
        with self._lock:
            self._is_stopping = True

    def join(self) -> None:
        """Let what is under way end, for a while."""
        with self._lock:
            threads = list(self._threads)
        end_s = time.monotonic() + CLOSE_GRACE_S
        for thread in threads:
            thread.join(timeout=max(0.0, end_s - time.monotonic()))

    def _work(self) -> None:
        while (order := self._next()) is not None:
            self._tell(Connected(order, self._connect(order)))
            self._ended(order)

    def _next(self) -> ConnectPeer | None:
        """Return what to do next; None when there is nothing, and this thread is done."""
        with self._lock:
            if self._due and not self._is_stopping:
                return self._orders[self._due.popleft()][0]
            self._threads.discard(threading.current_thread())
            return None

    def _ended(self, order: ConnectPeer) -> None:
        with self._lock:
            orders = self._orders[order.peer_id]
            orders.popleft()
            if orders:
                self._due.append(order.peer_id)
            else:
                del self._orders[order.peer_id]

    def _connect(self, order: ConnectPeer) -> str:
        """Connect and return what went wrong, or nothing."""
        connector = self._connectors.get(order.connector)
        if connector is None:
            return f"this engine has no connector {order.connector}; it has {', '.join(self._connectors)}"
        if order.layouts and not self._has_staging:
            return (
                "its blocks have another layout, and this engine has no staging area to convert them (kv-staging-bytes)"
            )
        if self._attachments.stands(order):
            return ""
        peer = PeerPool(
            peer_id=order.peer_id,
            metadata=order.metadata,
            num_blocks=order.num_blocks,
            block_bytes=order.block_bytes,
            layouts=tuple(order.layouts),
        )
        self._attachments.make(order)
        try:
            connector.connect(peer)
        except MeshError as exc:
            self._attachments.broke(order)
            return exc.message
        except Exception as exc:  # the thread's top: a bad peer must not end it
            self._attachments.broke(order)
            log.exception("connecting %s over %s failed", order.peer_id, order.connector)
            return f"{type(exc).__name__}: {exc}"
        self._attachments.connected(order)
        return ""
