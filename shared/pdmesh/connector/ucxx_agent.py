"""An agent over UCXX's workers, endpoints and tagged messages. Used in the helper process only.

The bindings have no one-sided reads, so an agent answers reads itself: a reader posts a receive for each piece of memory, into
the place where it shall lie, and asks the owner's agent for the pieces; that one checks that they lie in what it has
registered and sends them. One thread makes all calls of the library; it sleeps on the worker's event descriptor.
"""

import contextlib
import ctypes
import itertools
import logging
import os
import queue
import secrets
import select
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np

from pdmesh.connector.native_agent import AgentSettings, CopyState, NativeAgent, Piece, Ranges, merged

log = logging.getLogger(__name__)

MAX_PIECE_BYTES = 4 << 20
MAX_ASK_BYTES = 16 << 20
"""Of one question for pieces; a longer one is not read."""
TOKEN_BYTES = 32
ASK_TAG = 1 << 63
"""Of questions; the tags of pieces are below it."""
FIRST_TAG_BITS = 62


class Greeting(msgspec.Struct, frozen=True, kw_only=True):
    """What other agents need of one."""

    address: bytes
    """Of its UCX worker."""
    token: bytes
    """Whoever asks for memory must know it."""


class Ask(msgspec.Struct, frozen=True, kw_only=True):
    """A reader wants pieces of memory sent, each under a tag of its own, counted from `first_tag`."""

    token: bytes
    address: bytes
    """Of the reader's UCX worker."""
    first_tag: int
    pieces: list[tuple[int, int]]
    """Address and bytes of each."""


@dataclass(slots=True)
class _Read:
    """One read; its state is moved on by the agent's thread."""

    peer: Greeting
    pieces: list[Piece]
    state: CopyState = CopyState.RUNNING
    requests: list[Any] = field(default_factory=list)
    """Receives, and the sending of the question."""
    keep: list[Any] = field(default_factory=list)
    """What the library reads from until then."""


class UcxxAgent(NativeAgent):
    """One UCX worker. Handles are numbers of this agent; peers' names are their metadata in hexadecimal digits."""

    def __init__(self, settings: AgentSettings) -> None:
        self._token = secrets.token_bytes(TOKEN_BYTES)
        self._regions: list[tuple[int, int]] = []
        self._reads: dict[int, _Read] = {}
        self._handles = itertools.count(1)
        self._orders: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._wake_fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        started: queue.SimpleQueue[Exception | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._work, args=[started], name="ucxx", daemon=True)
        self._thread.start()
        if (error := started.get()) is not None:
            raise error

    def register(self, address: int, num_bytes: int) -> None:
        self._regions.append((address, num_bytes))

    def metadata(self) -> bytes:
        return msgspec.msgpack.encode(Greeting(address=self._address, token=self._token))

    def add_peer(self, metadata: bytes) -> str:
        msgspec.msgpack.decode(metadata, type=Greeting)
        return metadata.hex()

    def remove_peer(self, name: str) -> None:
        address = _greeting_of(name).address
        self._order(lambda: self._close(address))

    def read(self, local: Ranges, remote: Ranges, peer: str) -> int:
        handle = next(self._handles)
        read = self._reads[handle] = _Read(_greeting_of(peer), list(merged(local, remote, MAX_PIECE_BYTES)))
        self._order(lambda: self._begin(read))
        return handle

    def state(self, handle: int) -> CopyState:
        return self._reads[handle].state

    def release(self, handle: int) -> None:
        if self._reads[handle].state is CopyState.RUNNING:
            raise RuntimeError("the read runs")
        del self._reads[handle]

    def _order(self, order: Callable[[], None]) -> None:
        self._orders.put(order)
        os.eventfd_write(self._wake_fd, 1)

    # ---- in the agent's thread ------------------------------------------------------------------

    def _work(self, started: "queue.SimpleQueue[Exception | None]") -> None:
        try:
            import ucxx._lib.libucxx as library
            from ucxx._lib.arr import Array

            self._library, self._array = library, Array
            context = library.UCXContext(feature_flags=(library.Feature.TAG, library.Feature.WAKEUP))
            self._worker = library.UCXWorker(context)
            self._worker.init_blocking_progress_mode()
            self._address: bytes = self._worker.address.tobytes()
        except Exception as exc:  # handed to whoever makes the agent
            started.put(exc)
            return
        self._endpoints: dict[bytes, Any] = {}
        self._running: list[_Read] = []
        self._asked: list[_Asked] = []
        self._sending: list[tuple[Any, Any]] = []
        """Requests for pieces that are sent, and what keeps their memory."""
        started.put(None)
        while True:
            self._progress()
            # An event that came before it was armed would not be told of.
            if self._worker.arm():
                select.select([self._worker.epoll_file_descriptor, self._wake_fd], [], [])

    def _progress(self) -> None:
        """Do what there is to do until nothing moves."""
        while True:
            with contextlib.suppress(BlockingIOError):
                os.eventfd_read(self._wake_fd)
            has_moved = bool(self._worker.progress_once())
            while not self._orders.empty():
                self._orders.get()()
                has_moved = True
            has_moved |= self._take_asks()
            self._sending = [each for each in self._sending if not each[0].completed]
            for read in list(self._running):
                has_moved |= self._look_at(read)
            if not has_moved:
                return

    def _begin(self, read: _Read) -> None:
        """Post the receives, then ask."""
        greeting = read.peer
        self._running.append(read)
        first_tag = secrets.randbits(FIRST_TAG_BITS)
        try:
            endpoint = self._endpoint(greeting.address)
            for number, (local, _, num_bytes) in enumerate(read.pieces):
                place = self._array(_memory(local, num_bytes))
                read.keep.append(place)
                read.requests.append(endpoint.tag_recv(place, self._library.UCXXTag(first_tag + number)))
            ask = msgspec.msgpack.encode(
                Ask(
                    token=greeting.token,
                    address=self._address,
                    first_tag=first_tag,
                    pieces=[(remote, num_bytes) for _, remote, num_bytes in read.pieces],
                )
            )
            question = self._array(np.frombuffer(ask, dtype=np.uint8).copy())
            read.keep.append(question)
            read.requests.append(endpoint.tag_send(question, self._library.UCXXTag(ASK_TAG)))
        except Exception as exc:  # any of the library's classes
            log.warning("a read over UCXX could not begin: %s", exc)
            # What was posted ends with the endpoint.
            self._close(greeting.address)
            if not read.requests:
                read.state = CopyState.FAILED
                self._running.remove(read)

    def _look_at(self, read: _Read) -> bool:
        """Whether a read has ended: with the last of its requests, however that went."""
        if not all(request.completed for request in read.requests):
            endpoint = self._endpoints.get(read.peer.address)
            if endpoint is not None and not endpoint.alive:
                # Ends its receives.
                self._close(read.peer.address)
                return True
            return False
        succeeded = len(read.requests) == len(read.pieces) + 1
        for request in read.requests:
            try:
                request.check_error()
            except Exception:  # any of the library's classes
                succeeded = False
        self._running.remove(read)
        read.requests, read.keep = [], []
        read.state = CopyState.DONE if succeeded else CopyState.FAILED
        return True

    def _take_asks(self) -> bool:
        """Receive questions and answer those that have arrived."""
        has_moved = False
        probe = self._worker.tag_probe(self._library.UCXXTag(ASK_TAG), remove=True)
        if probe.matched:
            has_moved = True
            buffer = np.empty(min(probe.length, MAX_ASK_BYTES), dtype=np.uint8)
            request = self._worker.tag_recv_with_handle(self._array(buffer), probe)
            self._asked.append(_Asked(request, buffer))
        for asked in [each for each in self._asked if each.request.completed]:
            has_moved = True
            self._asked.remove(asked)
            try:
                asked.request.check_error()
                self._answer(msgspec.msgpack.decode(asked.buffer.tobytes(), type=Ask))
            except Exception as exc:  # a peer that is gone or says nonsense costs itself
                log.warning("a question over UCXX is not answered: %s", exc)
        return has_moved

    def _answer(self, ask: Ask) -> None:
        if not secrets.compare_digest(ask.token, self._token):
            raise ValueError("it does not come from this mesh")
        for address, num_bytes in ask.pieces:
            if not any(begin <= address and address + num_bytes <= begin + size for begin, size in self._regions):
                raise ValueError("it is for memory that is not registered")
        endpoint = self._endpoint(ask.address)
        for number, (address, num_bytes) in enumerate(ask.pieces):
            place = self._array(_memory(address, num_bytes))
            self._sending.append((endpoint.tag_send(place, self._library.UCXXTag(ask.first_tag + number)), place))

    def _endpoint(self, address: bytes) -> Any:
        """Return the endpoint to a worker; one that has failed is made anew."""
        endpoint = self._endpoints.get(address)
        if endpoint is None or not endpoint.alive:
            self._close(address)
            peer = self._library.UCXAddress.create_from_buffer(bytearray(address))
            endpoint = self._worker.create_endpoint_from_worker_address(peer, True)
            self._endpoints[address] = endpoint
        return endpoint

    def _close(self, address: bytes) -> None:
        endpoint = self._endpoints.pop(address, None)
        if endpoint is not None:
            endpoint.close()


@dataclass(frozen=True, slots=True, eq=False)
class _Asked:
    request: Any
    buffer: "np.ndarray[tuple[int], np.dtype[np.uint8]]"


def _greeting_of(name: str) -> Greeting:
    return msgspec.msgpack.decode(bytes.fromhex(name), type=Greeting)


def _memory(address: int, num_bytes: int) -> "np.ndarray[tuple[int], np.dtype[np.uint8]]":
    """Memory of this process as an array, without a copy."""
    memory: ctypes.Array[ctypes.c_uint8] = (ctypes.c_uint8 * num_bytes).from_address(address)
    return np.ctypeslib.as_array(memory)
