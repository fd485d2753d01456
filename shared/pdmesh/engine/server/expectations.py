"""The consumer's end of pushes: prompts that another engine computes and that a proxy will send here, received meanwhile.

An expectation begins with the proxy's word and is over when its request has come, when the proxy or the clock says that none
will, or when the core needs the room. Its writer is another matter: it has stopped when the owner has said so at the end of
its stream. Where that word is missing `writers` gets it, or shuts the writer out; until then the blocks stay with the core.
"""

import asyncio
import contextlib
import logging
import secrets
import time
from collections import OrderedDict

import grpc.aio

from pdmesh.connector.active import UNKNOWN, PullEnd, are_as_told
from pdmesh.connector.handshake import Peer, translated
from pdmesh.connector.owner import PoolOwner
from pdmesh.connector.peers import PeerDirectory
from pdmesh.connector.pool import KVPool
from pdmesh.engine.messages import CoreReady
from pdmesh.engine.push_messages import (
    ALL_CACHED,
    INVALID,
    EndPush,
    ExpectPush,
    LandingReport,
    PushArrived,
    PushExpected,
)
from pdmesh.engine.server.attempts import reason_of
from pdmesh.engine.server.core_peers import Core
from pdmesh.engine.server.expected import Expected, Over
from pdmesh.engine.server.fetches import Tasks
from pdmesh.engine.server.identity import Identity
from pdmesh.engine.server.metrics import EngineMetrics
from pdmesh.engine.server.requests import RunningRequest, Sink
from pdmesh.engine.server.writers import ABORTED, Writers
from pdmesh.errors import MeshError, PeerUnavailable, TransferFailed
from pdmesh.protocol.exchange import Exchange
from pdmesh.protocol.messages import GroupBlocks
from pdmesh.protocol.pushes import Expectation, PushOrder, PushProgress, is_offer_id, order_to_pb, progress_from_pb
from pdmesh.protocol.ticket import request_digest
from pdmesh.protocol.transfers import Begin
from pdmesh.security import MeshSecret
from pdmesh_kernels.block_sum import sum_blocks

log = logging.getLogger(__name__)

MAX_EXPECTATIONS = 1024
"""Of all proxies together; one more is computed or pulled as if there were no push."""
REACH_TIMEOUT_S = 10.0
PLAN_TIMEOUT_S = 15.0
# The last chunk's write began before the ticket was made: it is here sooner than a pull that begins now.
SETTLE_WAIT_S = 0.5
UNSUMMED = "unsummed"


class Expectations:
    """All pushes that this engine may receive. Lives on the server's event loop."""

    def __init__(
        self,
        *,
        identity: Identity,
        ready: CoreReady,
        secret: MeshSecret,
        core: Core,
        peers: PeerDirectory,
        owner: PoolOwner,
        tasks: Tasks,
        metrics: EngineMetrics,
        pool: KVPool | None,
        is_enabled: bool,
    ) -> None:
        """`pool`: to sum what arrives; None: it is not checked."""
        self._identity = identity
        self._ready = ready
        self._secret = secret
        self._core = core
        self._peers = peers
        self._owner = owner
        self._tasks = tasks
        self._metrics = metrics
        self._pool = pool
        self._connector = ready.push_connectors[0] if is_enabled and ready.push_connectors else ""
        self._by_offer: dict[str, Expected] = {}
        self._by_transfer: dict[str, Expected] = {}
        self._withdrawn: OrderedDict[str, Sink] = OrderedDict()
        """Offers that were withdrawn and not expected: the one word may overtake the other."""
        self._settling: set[asyncio.Task[None]] = set()
        """Those that wait for a writer's word."""
        self._is_closed = False
        self.writers = Writers(core=core, peers=peers, connector=self._connector)

    def __len__(self) -> int:
        return len(self._by_transfer)

    def close(self) -> None:
        """The server shuts down, and the pool goes with it: nothing is expected, and no writer waited for, any more."""
        self._is_closed = True
        tasks = [expected.receiving for expected in self._by_transfer.values() if expected.receiving is not None]
        for task in [*tasks, *self._settling]:
            task.cancel()

    def expect(self, expectation: Expectation, sink: Sink) -> None:
        """Get ready for a push; what cannot be is counted, and its request served without."""
        if self._withdrawn.get(expectation.offer_id) is sink:
            del self._withdrawn[expectation.offer_id]
            self._metrics.pushes_received.inc("skipped", Over.WITHDRAWN)
            return
        if reason := self._obstacle(expectation):
            self._metrics.pushes_received.inc("skipped", reason)
            return
        expected = Expected(
            expectation=expectation,
            sink=sink,
            transfer_id=f"{self._identity.engine_id}-{secrets.token_hex(8)}",
            plan=asyncio.get_running_loop().create_future(),
            deadline_s=time.monotonic() + expectation.remaining_s,
        )
        self._by_offer[expectation.offer_id] = self._by_transfer[expected.transfer_id] = expected
        loop = asyncio.get_running_loop()
        expected.timer = loop.call_later(expectation.remaining_s, self._end, expected, Over.TIMEOUT)
        expected.receiving = self._tasks.create_task(self._receive(expected))
        expected.receiving.add_done_callback(lambda task: self._received(expected, task))

    def withdraw(self, sink: Sink, offer_id: str) -> None:
        """A proxy will send no request for it, or needs it no longer; unknown ones are over already, or come yet."""
        expected = self._by_offer.get(offer_id)
        if expected is not None and expected.sink is sink:
            self._end(expected, Over.WITHDRAWN)
        elif expected is None and is_offer_id(offer_id):
            self._withdrawn[offer_id] = sink
            if len(self._withdrawn) > MAX_EXPECTATIONS:
                self._withdrawn.popitem(last=False)

    def session_closed(self, sink: Sink) -> None:
        """A proxy has gone, and with it what it would have sent."""
        for expected in [each for each in self._by_offer.values() if each.sink is sink]:
            self._end(expected, Over.SESSION)
        for offer_id in [offer_id for offer_id, each in self._withdrawn.items() if each is sink]:
            del self._withdrawn[offer_id]

    def awaits_push(self, offer_id: str) -> bool:
        """Whether an offer's blocks are on their way here."""
        return offer_id in self._by_offer

    async def settled(self, running: RunningRequest, offer_id: str) -> str:
        """Return, for the request that goes on with an offer, the id of its push, when what is under way has arrived or it has
        taken long enough; empty when there is none."""
        expected = self._by_offer.get(offer_id)
        if expected is None:
            return ""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(SETTLE_WAIT_S):
                await expected.settled.wait()
        if expected.is_over:
            return ""
        expected.running = running
        return expected.transfer_id

    def planned(self, plan: PushExpected) -> None:
        """Take the core's answer."""
        expected = self._by_transfer.get(plan.transfer_id)
        if expected is not None and not expected.plan.done():
            expected.plan.set_result(plan)

    def landed(self, report: LandingReport) -> None:
        """The core needs it no longer: its request runs, or others need the room."""
        expected = self._by_transfer.get(report.transfer_id)
        if expected is None:
            return
        if (running := expected.running) is not None and report.num_tokens:
            num_blocks = report.num_tokens // self._ready.block_size * len(self._ready.layout_fingerprints)
            running.note_pushed(num_blocks * self._ready.block_bytes)
        self._end(expected, Over(report.reason) if report.reason else Over.CLAIMED)

    def _obstacle(self, expectation: Expectation) -> str:
        """Why an expectation is passed over; one word."""
        if not self._connector:
            return "no_push"
        if self._is_closed:
            return "closed"
        if len(self._by_transfer) >= MAX_EXPECTATIONS:
            return "too_many"
        tokens, vocab_size = expectation.token_ids, self._ready.vocab_size
        is_sound = is_offer_id(expectation.offer_id) and tokens and max(tokens) < vocab_size
        if not is_sound or len(tokens) > self._ready.max_model_len or expectation.offer_id in self._by_offer:
            return "malformed"
        return "" if len(tokens) >= self._ready.block_size else ALL_CACHED

    async def _receive(self, expected: Expected) -> None:
        """Receive all that comes. Whether the writer has stopped is in `is_stopped`, why it came to less in `failure`."""
        try:
            peer = await self._find_owner(expected.expectation)
            plan = await self._plan(expected)
            if plan.reason:
                expected.has_landing, expected.failure = False, plan.reason
                return
            await self._read(expected, peer, plan)
        except MeshError as exc:
            expected.failure = reason_of(exc)
        except TimeoutError:
            expected.failure = "timeout"
        except asyncio.CancelledError:
            if (task := asyncio.current_task()) is not None and task.cancelling():
                raise
            # Not this task's end: a call, cut off as somebody else lost the peer and its channel was closed.
            expected.failure = PullEnd.PEER_LOST
        except Exception:
            # One push must not take the server with it, whose task group this runs in.
            log.exception("a push from %s failed", expected.expectation.owner_id)
            self._metrics.unexpected_errors.inc("pushes")
            expected.failure = "internal"

    async def _find_owner(self, expectation: Expectation) -> Peer:
        peer = await self._peers.reach(expectation.owner_address, REACH_TIMEOUT_S)
        if peer.peer_id != expectation.owner_id:
            peer = await self._peers.confirm(peer, REACH_TIMEOUT_S)
        if peer.peer_id != expectation.owner_id:
            raise TransferFailed(f"restarted: {expectation.owner_address} is {peer.peer_id}")
        if peer.exchange is not Exchange.BYTES:
            # What is converted is pulled: there is nothing between a writer and its targets.
            raise TransferFailed(f"converted: the blocks of {peer.peer_id} are not as they are here")
        return peer

    async def _plan(self, expected: Expected) -> PushExpected:
        expectation = expected.expectation
        expected.has_landing = True
        self._core.send(
            ExpectPush(
                transfer_id=expected.transfer_id,
                token_ids=expectation.token_ids,
                cache_salt=expectation.cache_salt,
            )
        )
        async with asyncio.timeout(PLAN_TIMEOUT_S):
            return await expected.plan

    async def _read(self, expected: Expected, peer: Peer, plan: PushExpected) -> None:
        """Follow the owner's stream to its end."""
        expectation, ready = expected.expectation, self._ready
        if not (metadata := self._owner.metadata(self._connector)):
            raise TransferFailed(f"unproved: connector {self._connector} does not work here now")
        order = PushOrder(
            begin=Begin(
                transfer_id=expected.transfer_id,
                consumer_id=self._identity.peer_id,
                offer_id=expectation.offer_id,
                digest=request_digest(expectation.token_ids, cache_salt=expectation.cache_salt),
                remaining_s=expectation.remaining_s,
            ),
            targets=[
                GroupBlocks(group=group, block_ids=blocks, generations=[], first_block=plan.first_block)
                for group, blocks in enumerate(plan.blocks)
            ],
            connector=self._connector,
            metadata=metadata,
            num_blocks=ready.num_blocks,
            block_bytes=ready.block_bytes,
        )
        expected.has_ordered, expected.num_shut_out = True, self.writers.num_shut_out
        # Until its stream's end: the owner begins when the prompt has come and this pool is connected, which takes its time.
        self._peers.track(peer, expected.transfer_id, is_coming=True)
        try:
            call = peer.stub.Push(
                order_to_pb(order), timeout=expectation.remaining_s, metadata=self._secret.call_metadata()
            )
        except grpc.aio.UsageError as exc:
            # Another call has lost the peer, and closed its channel, before this one began.
            raise PeerUnavailable(f"{peer.address} was lost") from exc
        try:
            async for message in call:
                progress = progress_from_pb(message)
                if progress.peer_id != expectation.owner_id:
                    raise TransferFailed(f"restarted: {expectation.owner_address} is {progress.peer_id}")
                if progress.num_blocks > expected.num_blocks:
                    await self._check(plan, expected.num_blocks, progress)
                    expected.num_blocks = progress.num_blocks
                    self._core.send(PushArrived(transfer_id=expected.transfer_id, num_blocks=progress.num_blocks))
                expected.has_ended = progress.ended
                if progress.error is not None:
                    raise progress.error
                expected.is_stopped = progress.ended
        except grpc.aio.AioRpcError as exc:
            raise translated(exc, peer.address) from exc
        finally:
            call.cancel()
        if not expected.is_stopped:
            raise TransferFailed("peer_lost: the owner's stream ended early")

    async def _check(self, plan: PushExpected, start: int, progress: PushProgress) -> None:
        """Raise TransferFailed unless the blocks that are new sum to what the owner's do."""
        if not progress.checksums or self._pool is None:
            return
        if len(progress.checksums) != len(plan.blocks):
            raise TransferFailed(
                f"malformed: checksums of {len(progress.checksums)} groups came, of {len(plan.blocks)} are wanted"
            )
        for blocks, wanted in zip(plan.blocks, progress.checksums, strict=True):
            sums = await asyncio.to_thread(sum_blocks, self._pool.blocks, blocks[start : progress.num_blocks])
            if len(wanted) != len(sums) or not are_as_told(sums, wanted):
                raise TransferFailed(f"{PullEnd.CORRUPT}: blocks came otherwise than they were written")
            if UNKNOWN in wanted:
                # Full blocks have sums: the owner had given them away before it came to it. Nothing is found of them unchecked.
                raise TransferFailed(f"{UNSUMMED}: what was written has no sum at its owner any more")

    def _received(self, expected: Expected, receiving: asyncio.Task[None]) -> None:
        """Nothing more comes of the stream: see to it that the writer has stopped."""
        if self._is_closed:
            return
        expected.settled.set()
        if receiving.cancelled():
            expected.failure = expected.failure or "unwanted"
        self._count(expected)
        if expected.has_landing and expected.failure and (expected.running is None or expected.failure == INVALID):
            # Before its writer has stopped: a retry of the request must not find what may be broken.
            self._end(expected, Over.FAILED)
        if not expected.has_ordered:
            self._stopped(expected)
            return
        settling = self._settle_writer(expected)
        try:
            task = self._tasks.create_task(settling)
        except RuntimeError:
            # Another task's error ends the group that all of these run in, and the server and its pool with it.
            settling.close()
            return
        if not expected.is_stopped:
            self._settling.add(task)
            task.add_done_callback(self._settling.discard)

    async def _settle_writer(self, expected: Expected) -> None:
        if expected.is_stopped:
            self._stopped(expected)
            await self._peers.end(expected.expectation.owner_id, expected.transfer_id, True)
            return
        expectation = expected.expectation
        is_told = await self.writers.stop(
            expectation.owner_id,
            expectation.owner_address,
            expected.transfer_id,
            expected.num_shut_out,
            expected.deadline_s,
            expected.has_ended,
        )
        self._stopped(expected)
        if not is_told:
            # Shut out with the others it has not been asked, and it may live: it would be renewed for as long as that.
            await self._peers.end(expectation.owner_id, expected.transfer_id, False, ABORTED)

    def _stopped(self, expected: Expected) -> None:
        expected.is_stopped = True
        if expected.has_landing:
            self._core.send(EndPush(transfer_id=expected.transfer_id, is_stopped=True))
        self._forget_if_done(expected)

    def _end(self, expected: Expected, why: Over) -> None:
        """Nobody waits for it any more."""
        if expected.is_over:
            return
        expected.is_over = True
        self._metrics.pushes_over.inc(why)
        if expected.timer is not None:
            expected.timer.cancel()
        self._by_offer.pop(expected.expectation.offer_id, None)
        if expected.has_landing and why is not Over.CLAIMED:
            # That the owner takes it back may be what nobody waits for any more.
            is_broken = bool(expected.failure) or not expected.is_stopped
            self._core.send(EndPush(transfer_id=expected.transfer_id, is_unwanted=True, is_broken=is_broken))
        if expected.receiving is not None:
            expected.receiving.cancel()
        self._forget_if_done(expected)

    def _forget_if_done(self, expected: Expected) -> None:
        if expected.is_over and expected.is_stopped:
            self._by_transfer.pop(expected.transfer_id, None)

    def _count(self, expected: Expected) -> None:
        outcome = "skipped" if not expected.has_landing else "failed" if expected.failure else "arrived"
        self._metrics.pushes_received.inc(outcome, expected.failure)
        num_blocks = expected.num_blocks * len(self._ready.layout_fingerprints)
        self._metrics.push_bytes.inc("received", amount=num_blocks * self._ready.block_bytes)
