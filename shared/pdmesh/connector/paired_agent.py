"""Two agents of a transport behind one: large reads of peers on this host are shared by them, each in a thread of its own.

Within a host UCX copies in the very thread that asks it to, by a system call that looks every page up: 67 MB took 15 ms where
memcpy takes 7.5, and another CPU had nothing to do but sums. Two agents in two threads took 8. Two, because an agent makes
one copy at a time, and because one with several connections to a peer cannot say whether a copy that failed goes on.
"""

import itertools
import logging
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from threading import Lock

from pdmesh.connector.native_agent import (
    Arrived,
    CopyState,
    NativeAgent,
    NothingPosted,
    Ranges,
    SteppingAgent,
    WritingAgent,
)
from pdmesh.connector.shared_read import Part, SharedRead

log = logging.getLogger(__name__)

# The other thread has begun after a tenth of a millisecond, in which one copies half a megabyte; and the second agent costs
# 25 to 50 ms once.
LEAST_SHARED_BYTES = 4 << 20

_ENDED = (CopyState.DONE, CopyState.FAILED)


class PairedAgent(SteppingAgent):
    """The first agent is the one that others know. The second only reads, of peers of whom a read was done as soon as it was
    begun, and so by the thread that began it; it is made for the first of them."""

    def __init__(self, first: WritingAgent, make_second: Callable[[], NativeAgent]) -> None:
        self._first = first
        self._make_second = make_second
        self._second: NativeAgent | None = None
        self._lock = Lock()
        """Around the calls of the second agent, but those of a shared read, for which this thread waits."""
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="second-agent")
        self._regions: list[tuple[int, int]] = []
        self._metadata: dict[str, bytes] = {}
        """Of the peers that the second agent may be told of."""
        self._joined: dict[str, Future[str]] = {}
        """What it calls those that it was told of, once it has taken them in."""
        # Now, so that no read finds later that there can be no thread.
        self._begun: Future[str] | Future[None] = self._thread.submit(_nothing)
        """The last that the thread was given to do besides reads."""
        self._copies: dict[int, list[Part]] = {}
        self._handles = itertools.count(1)

    def register(self, address: int, num_bytes: int) -> None:
        self._first.register(address, num_bytes)
        self._regions.append((address, num_bytes))

    def metadata(self) -> bytes:
        return self._first.metadata()

    def add_peer(self, metadata: bytes) -> str:
        name = self._first.add_peer(metadata)
        if metadata != self._first.metadata():
            self._metadata[name] = metadata
        return name

    def remove_peer(self, name: str) -> None:
        self._metadata.pop(name, None)
        joined = self._joined.pop(name, None)
        if joined is not None:
            # After it was taken in, as the thread does one after the other.
            self._begun = self._thread.submit(self._leave, joined)
        self._first.remove_peer(name)

    def read(self, local: Ranges, remote: Ranges, peer: str) -> int:
        return self.read_in_steps(local, remote, peer, lambda begin, end: None)

    def takes_steps(self, peer: str) -> bool:
        joined = self._joined.get(peer)
        # Nor is it waited for what the thread does for another peer.
        return joined is not None and self._begun.done() and self._has_joined(peer, joined)

    def read_in_steps(self, local: Ranges, remote: Ranges, peer: str, arrived: Arrived) -> int:
        if len(local) < 2 or peer not in self._metadata or int(local[:, 1].sum()) < LEAST_SHARED_BYTES:
            return self._noted(Part(self._first, self._first.read(local, remote, peer)))
        if self.takes_steps(peer):
            return self._read_shared(SharedRead(local, remote, arrived), peer, self._joined[peer].result())
        part = Part(self._first, self._first.read(local, remote, peer))
        if peer not in self._joined and peer in self._metadata and part.seen() is CopyState.DONE:
            self._begun = self._joined[peer] = self._thread.submit(self._join, self._metadata[peer])
        return self._noted(part)

    def write(self, local: Ranges, remote: Ranges, peer: str) -> int:
        return self._noted(Part(self._first, self._first.write(local, remote, peer)))

    def state(self, handle: int) -> CopyState:
        with self._lock:
            states = {part.seen() for part in self._copies[handle]}
        # What nobody can say must be known at once; how the rest ends does not help. Nothing is left where all steps were done.
        worst = (CopyState.UNSETTLED, CopyState.RUNNING, CopyState.FAILED)
        return next((state for state in worst if state in states), CopyState.DONE)

    def release(self, handle: int) -> None:
        if self.state(handle) is CopyState.RUNNING:
            raise RuntimeError("the copy runs")
        parts = self._copies.pop(handle)
        with self._lock:
            _release(parts)

    def _noted(self, *parts: Part) -> int:
        handle = next(self._handles)
        self._copies[handle] = list(parts)
        return handle

    def _has_joined(self, peer: str, joined: Future[str]) -> bool:
        """Whether the second agent has taken a peer in that it was told of; where it could not it is not told again."""
        failure = joined.exception()
        if failure is not None:
            log.warning("reads of %s are not shared by two threads: %s", peer, failure)
            del self._metadata[peer], self._joined[peer]
        return failure is None

    def _read_shared(self, read: SharedRead, peer: str, name: str) -> int:
        """Read by both. Each may do its copies now, and nothing else would be done here meanwhile."""
        assert self._second is not None
        begun = self._thread.submit(read.run, self._second, name)
        read.run(self._first, peer)
        # Where the thread got no CPU, nothing is left for it. Else as long as its last step takes, like those of this thread; the
        # engine kills a process of which a read does not end.
        if not begun.cancel():
            begun.result()
        if not read.failures:
            return self._noted(*read.parts)
        unsettled = [failure for failure in read.failures if not isinstance(failure, NothingPosted)]
        if unsettled:
            raise unsettled[0]
        [failure, *_] = read.failures
        if any(part.seen() not in _ENDED for part in read.parts):
            raise RuntimeError(f"a part of a read runs, another does not: {failure}") from failure
        _release(read.parts)
        raise failure

    def _join(self, metadata: bytes) -> str:
        """Tell the second agent of a peer, and make it before if there is none; in the thread."""
        if self._second is None:
            second = self._make_second()
            for address, num_bytes in self._regions:
                second.register(address, num_bytes)
            self._second = second
        with self._lock:
            return self._second.add_peer(metadata)

    def _leave(self, joined: Future[str]) -> None:
        """Let the second agent forget a peer; in the thread."""
        if joined.exception() is None and self._second is not None:
            with self._lock:
                self._second.remove_peer(joined.result())


def _nothing() -> None:
    pass


def _release(parts: list[Part]) -> None:
    """Free all of them, also where one cannot be freed. Raises what the last of those did."""
    failure: Exception | None = None
    for part in parts:
        try:
            part.agent.release(part.handle)
        except Exception as exc:  # any of the library's classes
            failure = exc
    if failure is not None:
        raise failure
