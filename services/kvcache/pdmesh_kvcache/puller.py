"""Copies blocks out of engines' pools into an arena: the worker halves of the connectors, driven from the event loop.

Worker halves are not thread-safe, so all of them live on one thread of this arena; only connecting, which may block for
seconds when an engine does not answer, has threads of its own. The loop hears of ended pulls through their descriptors.
"""

import asyncio
import itertools
import logging
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack
from dataclasses import replace
from functools import partial
from types import TracebackType
from typing import Self, TypeVar

from pdmesh.connector.active import PullEnd, may_be_connectors
from pdmesh.connector.base import PeerPool, Pull, PullResult, WorkerConnector
from pdmesh.connector.options import ConnectorOptions
from pdmesh.connector.peers import Peer, PeerDirectory
from pdmesh.connector.registry import make_worker_connectors
from pdmesh.errors import ConfigError, HandshakeRefused, MeshError, PeerUnavailable, TransferFailed
from pdmesh.security import MeshSecret
from pdmesh_kvcache.arena import Arena

log = logging.getLogger(__name__)

ResultT = TypeVar("ResultT")

# An engine that is gone, or has nothing to store, does not keep its pool mapped here; meeting it again takes milliseconds.
PEER_IDLE_S = 30.0
# Engines that do not answer and may be waited for at the same time.
NUM_CONNECT_THREADS = 4
# Connectors end a pull at its deadline or a second later; one that overlooks it is told.
CANCEL_GRACE_S = 2.0


class Puller:
    """An async context manager around one arena's connectors. Leaving it ends all pulls; after that nothing writes."""

    def __init__(
        self,
        arena: Arena,
        connectors: list[str],
        secret: MeshSecret,
        *,
        on_loopback: bool,
        options: dict[str, ConnectorOptions],
        on_metadata: Callable[[str, bytes], None],
        on_left_out: Callable[[str], None],
    ) -> None:
        self.metadata: dict[str, bytes] = {}
        """What consumers of the arena need, by connector."""
        self._arena = arena
        self._names = connectors
        self._secret = secret
        self._on_loopback = on_loopback
        self._options = options
        self._on_metadata = on_metadata
        self._on_left_out = on_left_out
        self._connectors: dict[str, WorkerConnector] = {}
        self._connectors_of: dict[str, set[str]] = {}
        self._num_pulls: Counter[str] = Counter()
        self._idle_timers: dict[str, asyncio.TimerHandle] = {}
        self._closing = False
        self._waiting: dict[str, asyncio.Future[PullResult]] = {}
        self._numbers = itertools.count()
        self._stack = AsyncExitStack()
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="puller")
        self._connect_threads = ThreadPoolExecutor(NUM_CONNECT_THREADS, thread_name_prefix="puller-connect")
        # Disconnects that the thread has not come to yet, by peer.
        self._leaving: dict[str, asyncio.Future[None]] = {}
        self._loop = asyncio.get_running_loop()
        self.peers = PeerDirectory(
            arena.peer_id,
            secret,
            connectors,
            arena.kind.model_fingerprint,
            [arena.kind.layout_fingerprint],
            self._attach,
            self._detach,
        )

    async def __aenter__(self) -> Self:
        async with AsyncExitStack() as stack:
            stack.callback(self._thread.shutdown)
            self._connectors = await self._in_thread(
                partial(
                    make_worker_connectors,
                    self._names,
                    peer_id=self._arena.peer_id,
                    secret=self._secret,
                    on_loopback=self._on_loopback,
                    options=self._options,
                )
            )
            for connector in self._connectors.values():
                stack.push_async_callback(self._in_thread, connector.close)
            for name, connector in list(self._connectors.items()):
                try:
                    self.metadata[name] = await self._in_thread(partial(connector.register, self._arena.pool))
                except ConfigError as exc:
                    self._leave_out(name, exc)
                    continue
                self._follow_metadata(name, connector)
                self._watch(connector)
                stack.callback(self._loop.remove_reader, connector.fileno())
            stack.push_async_callback(asyncio.to_thread, self._connect_threads.shutdown)
            await stack.enter_async_context(self.peers)
            self._stack = stack.pop_all()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._closing = True
        for timer in self._idle_timers.values():
            timer.cancel()
        await self._stack.aclose()
        for waiting in self._waiting.values():
            waiting.cancel()

    def _leave_out(self, name: str, error: ConfigError) -> None:
        """Go without a connector that does not start; raises its error when there is no other."""
        del self._connectors[name]
        if not self._connectors:
            raise error
        log.warning("the arena of layout %s goes without it: %s", self._arena.kind.layout_fingerprint, error.message)
        self._on_left_out(name)

    def _follow_metadata(self, name: str, connector: WorkerConnector) -> None:
        def changed(metadata: bytes) -> None:
            self._loop.call_soon_threadsafe(self._on_metadata, name, metadata)

        connector.watch_metadata(changed)

    async def reach(self, owner_id: str, address: str, deadline_s: float) -> Peer:
        """Return the attached owner of a store's blocks. Raises HandshakeRefused or PeerUnavailable."""
        peer = await self.peers.reach(address, deadline_s)
        if peer.peer_id != owner_id:
            # The one we knew may be gone and its successor asks; or the other way round: the address tells.
            peer = await self.peers.confirm(peer, deadline_s)
        if peer.peer_id != owner_id:
            raise PeerUnavailable(f"{owner_id} is gone: {peer.peer_id} answers at {address}")
        self._forget_when_idle(peer.peer_id)
        return peer

    async def pull(
        self,
        peer: Peer,
        block_ids: list[int],
        generations: list[int],
        slots: list[int],
        deadline_s: float,
        *,
        checksums: list[int],
        on_rerouted: Callable[[str], None] = lambda connector: None,
    ) -> PullResult:
        """Copy blocks into reserved slots and wait until nothing writes to them any more, however it ends.

        What may be a connector's failure is tried over the next one that reaches the peer; `on_rerouted` is told which failed.
        """
        connector, end_s = peer.connector, self._loop.time() + deadline_s
        damaged: list[str] = []
        # Also between two ways: the peer is used.
        self._num_pulls[peer.peer_id] += 1
        self._stop_timer(peer.peer_id)
        try:
            while True:
                pull = Pull(
                    transfer_id=f"store-{next(self._numbers)}",
                    peer_id=peer.peer_id,
                    source_block_ids=block_ids,
                    generations=generations,
                    target_block_ids=slots,
                    deadline_s=max(end_s - self._loop.time(), 0.0),
                    checksums=checksums,
                )
                result = await self._pull_over(connector, pull)
                if not result.reason and damaged:
                    self.peers.came_whole(peer, connector, after=damaged)
                if result.reason == PullEnd.CORRUPT:
                    damaged.append(connector)
                next_one = await self._next_way(peer, connector, result.reason, end_s)
                if not next_one:
                    # Bytes that came whole over no way leave open which of the two is at fault, whatever failed last.
                    return replace(result, reason=PullEnd.CORRUPT) if damaged and result.reason else result
                on_rerouted(connector)
                connector = next_one
        finally:
            self._num_pulls -= Counter([peer.peer_id])
            self._forget_when_idle(peer.peer_id)

    async def _next_way(self, peer: Peer, connector: str, reason: str, end_s: float) -> str:
        """Return the connector over which a pull that ended so goes on; empty: it has ended. Takes as long as a handshake, and
        as a connector takes to connect."""
        is_last = connector == self._names[-1] or self._loop.time() >= end_s or self._closing
        if is_last or not may_be_connectors(reason) or not self.peers.knows(peer):
            return ""
        try:
            return await self.peers.attach_after(peer, connector, TransferFailed(f"{reason}: of a store"))
        except MeshError as exc:
            log.debug(
                "a pull from %s that ended as %s goes over no other connector: %s", peer.peer_id, reason, exc.message
            )
            return ""

    async def _pull_over(self, name: str, pull: Pull) -> PullResult:
        """Copy over one connector, and wait until it writes nothing any more.

        That is at its deadline at the latest, or when a connector that let it pass has stopped after being told to: slots
        that something may write to cannot be given to others, so there is no third way. Being cancelled leaves the copy
        running: only the closing arena cancels, and it ends the copy first.
        """
        connector = self._connectors[name]
        waiting: asyncio.Future[PullResult] = self._loop.create_future()
        self._waiting[pull.transfer_id] = waiting
        try:
            await self._in_thread(partial(connector.start, pull))
            await asyncio.wait([waiting], timeout=pull.deadline_s + CANCEL_GRACE_S)
            if not waiting.done():
                log.warning("connector %s let the deadline of a pull from %s pass", name, pull.peer_id)
                await self._in_thread(partial(connector.cancel, pull.transfer_id))
            return await waiting
        finally:
            self._waiting.pop(pull.transfer_id, None)

    def _forget_when_idle(self, peer_id: str) -> None:
        self._stop_timer(peer_id)
        if not self._num_pulls[peer_id] and not self._closing:
            self._idle_timers[peer_id] = self._loop.call_later(PEER_IDLE_S, self._forget, peer_id)

    def _forget(self, peer_id: str) -> None:
        # Also for one that was lost meanwhile, which would not be detached again.
        self._stop_timer(peer_id)
        self.peers.forget(peer_id)

    def _stop_timer(self, peer_id: str) -> None:
        if (timer := self._idle_timers.pop(peer_id, None)) is not None:
            timer.cancel()

    async def _attach(self, pool: PeerPool, name: str) -> None:
        if (connector := self._connectors.get(name)) is None:
            raise HandshakeRefused(f"connector {name} does not start here")
        if (leaving := self._leaving.get(pool.peer_id)) is not None:
            # Or it would end the connection that is made now.
            await asyncio.wait([leaving])
        try:
            await self._loop.run_in_executor(self._connect_threads, connector.connect, pool)
        except MeshError:
            raise
        except Exception as exc:  # any of a library's classes: the next connector may work
            log.exception("connecting %s over %s failed", pool.peer_id, name)
            raise HandshakeRefused(f"{pool.peer_id} over {name}: {type(exc).__name__}: {exc}") from exc
        self._connectors_of.setdefault(pool.peer_id, set()).add(name)

    def _detach(self, peer_id: str) -> None:
        self._stop_timer(peer_id)
        attached = [self._connectors[name] for name in self._connectors_of.pop(peer_id, ())]

        def disconnect() -> None:
            for connector in attached:
                connector.disconnect(peer_id)

        leaving = self._leaving[peer_id] = self._loop.run_in_executor(self._thread, disconnect)
        leaving.add_done_callback(lambda _: self._leaving.pop(peer_id, None))

    def _watch(self, connector: WorkerConnector) -> None:
        self._loop.add_reader(connector.fileno(), self._poll, connector)

    def _poll(self, connector: WorkerConnector) -> None:
        # Silent until the results are taken, or the loop would spin meanwhile.
        self._loop.remove_reader(connector.fileno())
        self._thread.submit(self._take, connector)

    def _take(self, connector: WorkerConnector) -> None:
        results = connector.poll()
        self._loop.call_soon_threadsafe(self._deliver, connector, results)

    def _deliver(self, connector: WorkerConnector, results: list[PullResult]) -> None:
        for result in results:
            waiting = self._waiting.get(result.transfer_id)
            if waiting is not None and not waiting.done():
                waiting.set_result(result)
        if not self._closing:
            self._watch(connector)

    async def _in_thread(self, call: Callable[[], ResultT]) -> ResultT:
        return await self._loop.run_in_executor(self._thread, call)
