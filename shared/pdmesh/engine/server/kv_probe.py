"""Proves the connectors: each pulls one block of this engine's own pool over its own loopback, by the way that peers' pulls take.

A connector that fails is not offered, until it has been proved after all; an engine without any is not ready. The first
that works is waited for at the start, the others are proved while the engine serves already.
"""

import asyncio
import logging
from itertools import count

from pdmesh.connector.base import PeerPool
from pdmesh.connector.handshake import GRPC_CONNECTOR
from pdmesh.connector.owner import PoolOwner
from pdmesh.engine.messages import CoreReady, OwnBlockPulled, PullOwnBlock
from pdmesh.engine.server.core_peers import CorePeers
from pdmesh.engine.server.identity import Identity
from pdmesh.engine.server.metrics import EngineMetrics
from pdmesh.errors import DeadlineExceeded, HandshakeRefused, MeshError, PeerUnavailable
from pdmesh.protocol import mesh_pb2 as pb

log = logging.getLogger(__name__)

# The core gives the pull up after the first; a core whose blocks are all in use pulls when there are two.
PULL_TIMEOUT_S = 5.0
ANSWER_TIMEOUT_S = 15.0
FIRST_BACKOFF_S = 1.0
LAST_BACKOFF_S = 60.0


class KVProbe:
    """Knows which connectors of one engine are proved, and tells `owner` and `info` which to offer."""

    def __init__(
        self,
        *,
        identity: Identity,
        ready: CoreReady,
        names: list[str],
        core_peers: CorePeers,
        owner: PoolOwner,
        info: pb.EngineInfo,
        metrics: EngineMetrics,
    ) -> None:
        """`names` in order of preference."""
        self._identity = identity
        self._ready = ready
        self._names = [name for name in names if name in ready.connectors]
        self._metadata = dict(ready.connectors)
        self._core_peers = core_peers
        self._owner = owner
        self._info = info
        self._metrics = metrics
        self._numbers = count(1)
        self._waiting: dict[int, asyncio.Future[OwnBlockPulled]] = {}
        self._turn = asyncio.Lock()
        self._errors: dict[str, str] = {}
        """Why connectors are not offered."""
        self._due = asyncio.Event()
        self._is_serving = asyncio.Event()
        self._works = asyncio.Event()
        self._unproved = set(self._names)
        for name in self._names:
            metrics.probe_failures.inc(name, amount=0)
            metrics.connector_proved.labels(identity.model_name, "0", name).set(0)

    @property
    def problem(self) -> str:
        """Why this engine can exchange no KV; empty when it can."""
        is_one_missing = self._is_serving.is_set() and not self._works.is_set()
        if not self._names or (len(self._errors) < len(self._names) and not is_one_missing):
            return ""
        reasons = "; ".join(f"{name}: {self._errors.get(name, 'not proved yet')}" for name in self._names)
        return f"no KV connector works ({reasons})"

    async def first(self) -> None:
        """Prove connectors, the preferred one first, until one works."""
        for name in self._names:
            await self._prove(name)
            if self._works.is_set():
                break
        self._is_serving.set()
        if self.problem:
            log.error("not ready: %s", self.problem)

    async def works(self) -> None:
        """Return when some connector works."""
        await self._works.wait()

    async def run(self) -> None:
        """Prove the others, those that changed, and again those that failed or had no verdict, until cancelled; asleep while
        there are none."""
        await self._is_serving.wait()
        backoff_s = FIRST_BACKOFF_S
        while True:
            # Before and not behind: one that changes meanwhile is due.
            self._due.clear()
            for name in [each for each in self._names if each in self._unproved]:
                await self._prove(name)
            is_open = bool(self._errors or self._unproved)
            if not is_open:
                backoff_s = FIRST_BACKOFF_S
            try:
                async with asyncio.timeout(backoff_s if is_open else None):
                    await self._due.wait()
            except TimeoutError:
                backoff_s = min(2 * backoff_s, LAST_BACKOFF_S)
                self._unproved |= self._errors.keys()

    def changed(self, connector: str, metadata: bytes) -> None:
        """What consumers need of a connector is another now."""
        self._metadata[connector] = metadata
        if connector not in self._errors:
            self._owner.set_metadata(connector, metadata)
        self._unproved.add(connector)
        self._due.set()

    def pulled(self, message: OwnBlockPulled) -> None:
        """Take the core's answer; nobody may wait for it any more."""
        waiting = self._waiting.get(message.number)
        if waiting is not None and not waiting.done():
            waiting.set_result(message)

    async def _prove(self, name: str) -> None:
        self._unproved.discard(name)
        try:
            error = await self._error_of(name)
        except DeadlineExceeded as exc:
            # The core has no two blocks to spare, or is busy with worse: nothing is known of the connector.
            log.info("connector %s is not proved yet: %s", name, exc.message)
            self._unproved.add(name)
            return
        self._metrics.connector_proved.labels(self._identity.model_name, "0", name).set(not error)
        if error:
            self._metrics.probe_failures.inc(name)
            if name not in self._errors:
                log.warning("connector %s cannot move KV here and is not offered: %s", name, error)
            self._errors[name] = error
            self._owner.withdraw(name)
        else:
            self._works.set()
            if self._errors.pop(name, None) is not None:
                log.info("connector %s works now and is offered", name)
                self._owner.set_metadata(name, self._metadata[name])
        offered = [each for each in self._names if each not in self._errors]
        if offered != list(self._info.connectors):
            self._info.connectors[:] = offered

    async def _error_of(self, name: str) -> str:
        """Pull a block over a connector; what went wrong, or nothing. Raises DeadlineExceeded when that cannot be said."""
        pool = PeerPool(
            peer_id=self._identity.peer_id,
            # The grpc connector reads from where a peer has found the owner.
            metadata=self._identity.address.encode() if name == GRPC_CONNECTOR else self._metadata[name],
            num_blocks=self._ready.num_blocks,
            block_bytes=self._ready.block_bytes,
        )
        async with self._turn:
            number = next(self._numbers)
            answer: asyncio.Future[OwnBlockPulled] = asyncio.get_running_loop().create_future()
            self._waiting[number] = answer
            try:
                await self._core_peers.attach(pool, name)
                self._core_peers.send(PullOwnBlock(number=number, peer_id=pool.peer_id, deadline_s=PULL_TIMEOUT_S))
                async with asyncio.timeout(ANSWER_TIMEOUT_S):
                    return (await answer).error
            except PeerUnavailable as exc:
                raise DeadlineExceeded(exc.message) from exc
            except TimeoutError:
                raise DeadlineExceeded(f"the core did not pull a block within {ANSWER_TIMEOUT_S:.0f} s") from None
            except HandshakeRefused as exc:
                return exc.message
            except MeshError as exc:
                return f"{exc.code}: {exc.message}"
            finally:
                del self._waiting[number]
                self._core_peers.detach(pool.peer_id)
