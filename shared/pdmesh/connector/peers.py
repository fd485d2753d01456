"""The consumer's end between server processes: who the owners are, which connector reaches each, and their transfers' leases.

One handshake per address at a time, its result kept until a call says that the peer is gone; the next request then starts
afresh, so a restarted owner (new epoch) replaces the old. The worker half of the chosen connector is attached through the
caller's `attach` (an engine's lives in its core process). Whether an address may be dialled at all is the caller's to decide.

A peer whose connection ends is asked soon who it is, so that the memory of a dead one goes although nobody calls it again.
Dropping a peer ends every pull from it, so a call that is merely slow drops nobody: it fails by itself, and when that repeats
a handshake asks whether the peer is still the one it was.

An address at which nobody answered a handshake is not asked by everyone: see `silences`.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import asynccontextmanager
from types import TracebackType
from typing import Self

import grpc
import grpc.aio

from pdmesh.channels import disconnected
from pdmesh.connector.handshake import Attach, Greeter, Peer, cut_off_as_lost, is_gone, make_peer, open_stub, translated
from pdmesh.connector.publications import PUBLISH_TIMEOUT_S, PUBLISHING
from pdmesh.connector.regaining import Regaining
from pdmesh.connector.renewals import renew
from pdmesh.connector.silences import Silences
from pdmesh.errors import MeshError, PeerUnavailable
from pdmesh.protocol import mesh_pb2 as pb
from pdmesh.protocol.exchange import KVDescription
from pdmesh.protocol.messages import GroupBlocks
from pdmesh.protocol.offers import RENEW_INTERVAL_S
from pdmesh.protocol.peer_bounds import MAX_REASON_CHARS
from pdmesh.protocol.transfers import Begin, Begun, End, Ended, begin_to_pb, begun_from_pb, end_to_pb, ended_from_pb
from pdmesh.security import MeshSecret

__all__ = ["Ask", "Peer", "PeerDirectory"]

log = logging.getLogger(__name__)

# A healthy owner answers in milliseconds: these bound what a dead one costs.
CALL_TIMEOUT_S = 5.0
END_TIMEOUT_S = 2.0
NUM_TIMEOUTS_TO_PROBE = 2
# From the end of a peer's connection to the question who is there: calls of that time find out by themselves.
DISCONNECTED_PAUSE_S = 2.0

Detach = Callable[[str], None]
"""Disconnects the worker half from a peer id; never blocks."""

Ask = Callable[[Peer, str, str], Awaitable[Begun]]
"""Asks a peer to begin the transfer of a given id, over the named connector."""


class PeerDirectory:
    """Owners by address. An async context manager: leaving it detaches and closes all. Lives on one event loop.

    `block_bytes`, one per layout, lets the tier make its arena for that layout at the handshake.
    """

    def __init__(
        self,
        peer_id: str,
        secret: MeshSecret,
        connectors: list[str],
        model_fingerprint: str,
        layout_fingerprints: list[str],
        attach: Attach,
        detach: Detach,
        *,
        block_bytes: list[int] | None = None,
        description: KVDescription | None = None,
    ) -> None:
        self._greeter = Greeter(
            peer_id,
            secret,
            connectors,
            model_fingerprint,
            layout_fingerprints,
            attach,
            block_bytes=block_bytes or [],
            description=description,
        )
        self.fallbacks = self._greeter.fallbacks
        """Times a connector could not be used and the next one was, by the name of the one that could not."""
        self._regaining = Regaining(
            self._greeter, knows=self.knows, in_background=self._in_background, detach=self._detach_stray
        )
        self.regained = self._regaining.regained
        """Times a connector could be used again that could not be at the handshake, by its name."""
        self.lost: int = 0
        """Peers dropped because they were gone or came back under a new epoch."""
        self._peer_id = peer_id
        self._secret = secret
        self._detach = detach
        self._known: dict[str, Peer] = {}
        """By address; a process with two names stands here twice."""
        self._meeting: dict[str, asyncio.Task[Peer]] = {}
        self._silences = Silences()
        self._renewing: asyncio.Task[None] | None = None
        self._background: set[asyncio.Task[None]] = set()
        self._closing: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        running = [*self._meeting.values(), *self._background]
        for task in running:
            task.cancel()
        if running:
            await asyncio.wait(running)
        for peer in self._peers():
            self._drop(peer)
        if self._closing:
            await asyncio.wait(self._closing)

    async def reach(self, address: str, deadline_s: float, *, owner: str = "") -> Peer:
        """Return the attached peer at a gRPC address, shaking hands first when needed; at most `deadline_s`.

        `owner`: peer id of the start that the caller has a ticket of. A handshake that takes longer goes on for whoever asks
        next. Raises HandshakeRefused (protocol, model or layout differ, no common connector works) or PeerUnavailable; that at
        once where the last handshake had no answer and another is not due yet, or is under way.
        """
        if (known := self._known.get(address)) is not None:
            if known.num_timeouts >= NUM_TIMEOUTS_TO_PROBE:
                raise PeerUnavailable(f"{address} does not answer; it is being asked whether it still lives")
            self._regaining.note_used(known)
            return known
        self._silences.admit(address, owner)
        meeting = self._meeting.get(address)
        if meeting is None:
            meeting = self._meeting[address] = asyncio.create_task(self._meet(address), name="handshake")
            meeting.add_done_callback(lambda task: self._met(address, owner, task))
        await asyncio.wait([meeting], timeout=deadline_s)
        if not meeting.done() or meeting.cancelled():
            raise PeerUnavailable(f"{address} did not finish the handshake within {deadline_s:.1f} s")
        return meeting.result()

    async def confirm(self, peer: Peer, deadline_s: float) -> Peer:
        """Ask who is at a peer's address now: the same peer when it still is, else its successor after a new handshake.

        Raises HandshakeRefused or PeerUnavailable.
        """
        try:
            reply = (await self._greeter.ask(peer.stub, peer.address, deadline_s)).reply
        except MeshError as exc:
            if not is_gone(exc):
                raise
        else:
            if reply.peer_id == peer.peer_id:
                return peer
        self._lose(peer)
        return await self.reach(peer.address, deadline_s)

    async def attach_after(self, peer: Peer, connector: str, why: MeshError) -> str:
        """Attach a peer over the next connector after one that has failed it, beside it; returns its name.

        Raises HandshakeRefused when no other one works, or PeerUnavailable.
        """
        async with peer.attaching:
            name = next((each for each in self._greeter.after(connector) if each in peer.attached), None)
            if name is None:
                greeting = await self._greeter.ask(peer.stub, peer.address)
                if greeting.reply.peer_id != peer.peer_id or not self.knows(peer):
                    raise PeerUnavailable(f"{peer.address} is not {peer.peer_id} any more")
                name = await self._greeter.attach_first(peer.address, greeting, after=connector)
                if not self.knows(peer):
                    self._detach_stray(peer.peer_id)
                    raise PeerUnavailable(f"{peer.address} was lost")
                peer.attached.add(name)
        self._greeter.count_fallback(connector, peer.address, why)
        return name

    def knows(self, peer: Peer) -> bool:
        """Whether a peer is still attached."""
        return peer in self._known.values()

    async def begin(
        self,
        peer: Peer,
        *,
        transfer_id: str,
        offer_id: str,
        digest: bytes,
        groups: list[GroupBlocks] | None = None,
        remaining_s: float,
        connector: str = "",
        awaits: bool = False,
    ) -> Begun:
        """Announce a transfer to the owner; it is renewed from now on until `end`. `awaits`: of an offer that may still be open.

        Who answers may be the successor of `peer`, whose memory is not the one attached: compare. Raises PeerUnavailable or
        HandshakeRefused when nobody of this mesh answers.
        """
        begin = Begin(
            transfer_id=transfer_id,
            consumer_id=self._peer_id,
            offer_id=offer_id,
            digest=digest,
            groups=groups or [],
            remaining_s=remaining_s,
            connector=connector or peer.connector,
            awaits=awaits,
        )
        published_s = PUBLISH_TIMEOUT_S if begin.connector in PUBLISHING else 0.0
        timeout_s = remaining_s if awaits else CALL_TIMEOUT_S + published_s
        async with self._calling(peer):
            reply: pb.BeginTransferReply = await peer.stub.BeginTransfer(
                begin_to_pb(begin), timeout=min(timeout_s, remaining_s), metadata=self._secret.call_metadata()
            )
        begun = begun_from_pb(reply)
        if begun.error is None:
            self.track(peer, transfer_id)
        return begun

    def track(self, peer: Peer, transfer_id: str, *, is_coming: bool = False) -> None:
        """Renew a transfer that the owner knows already (a tier lookup's) until `end`; `is_coming`: or will know."""
        peer.track(transfer_id, is_coming=is_coming)
        if self._renewing is None or self._renewing.done():
            self._renewing = self._in_background(self._renew(), "renew-transfers")

    async def end(
        self, peer_id: str, transfer_id: str, committed: bool, reason: str = "", *, met: Peer | None = None
    ) -> Ended | None:
        """Tell the owner how a transfer ended, and learn what it makes of that. None when it has not answered in time: a live one
        is told once more in the background, else its lease ends it.

        A peer whose memory could not be read is dropped, so that the next `reach` shakes hands anew: see `Peer.fails`. Not one
        that was met again since the transfer began with `met`.
        """
        peer = self._by_id(peer_id)
        if peer is None:
            return None
        peer.untrack(transfer_id)
        request = end_to_pb(
            End(transfer_id=transfer_id, committed=committed, reason=reason[:MAX_REASON_CHARS], peer_id=peer_id)
        )
        ended = None
        try:
            async with self._calling(peer):
                reply: pb.EndTransferReply = await peer.stub.EndTransfer(
                    request, timeout=END_TIMEOUT_S, metadata=self._secret.call_metadata()
                )
            ended = ended_from_pb(reply)
        except MeshError as exc:
            log.debug("%s was not told of the end of %s: %s", peer_id, transfer_id, exc.message)
        if met in (None, peer) and peer.fails(committed, reason):
            self._lose(peer)
        elif ended is None and self.knows(peer):
            self._in_background(self._end_again(peer, request), "end-again")
        return ended

    async def _end_again(self, peer: Peer, request: pb.EndTransferRequest) -> None:
        try:
            async with self._calling(peer):
                await peer.stub.EndTransfer(request, timeout=CALL_TIMEOUT_S, metadata=self._secret.call_metadata())
        except MeshError as exc:
            log.warning("%s was not told of the end of %s: %s", peer.peer_id, request.transfer_id, exc.message)

    def came_whole(self, peer: Peer, connector: str, *, after: list[str]) -> None:
        """A transfer's bytes are right over a connector, `after` they were damaged over others: see `damages`."""
        if self._greeter.damages.came_whole(peer.peer_id, connector, after) and peer.connector in after:
            self._regaining.replace(peer, connector)

    def forget(self, peer_id: str, *, met: Peer | None = None) -> None:
        """Drop a peer, as after a pull that ended with `peer_lost`, unless it was met anew since it was `met`."""
        peer = self._by_id(peer_id)
        if peer is not None and met in (None, peer):
            self._lose(peer)

    def _forget_other_epochs(self, peer_id: str) -> None:
        """A process that came back under another epoch is not the one that was known, whichever of the two is newer."""
        engine_id = peer_id.rpartition("@")[0]
        for peer in self._peers():
            if peer.peer_id.rpartition("@")[0] == engine_id:
                self._lose(peer)

    async def _meet(self, address: str) -> Peer:
        channel, stub = open_stub(address, self._secret)
        try:
            greeting = await self._greeter.ask(stub, address)
            reply = greeting.reply
            # It answers: whoever comes now waits for this meeting, which may take its time in the core.
            self._silences.answered(address)
            async with self._greeter.turns.of(reply.peer_id):
                if (known := self._by_id(reply.peer_id)) is not None:
                    # The same process under a second name.
                    self._known[address] = known
                    await channel.close(None)
                    return known
                self._forget_other_epochs(reply.peer_id)
                connector = await self._greeter.attach_first(address, greeting)
                peer = self._known[address] = make_peer(greeting, address, connector, channel, stub)
        except BaseException:
            await channel.close(None)
            raise
        self._regaining.note_met(peer)
        self._in_background(self._watch(peer), "watch-peer")
        return peer

    async def _watch(self, peer: Peer) -> None:
        """Ask again who is there when a peer's connection has ended: nobody may ever call an address that is no more, and until
        it is dropped a dead peer's memory stays mapped.
        """
        while self.knows(peer):
            await disconnected(peer.channel)
            await asyncio.sleep(DISCONNECTED_PAUSE_S)
            if self.knows(peer):
                await self._probe(peer)

    def _met(self, address: str, owner: str, meeting: asyncio.Task[Peer]) -> None:
        del self._meeting[address]
        # Taken note of even when nobody waits any more.
        if meeting.cancelled() or isinstance(meeting.exception(), PeerUnavailable):
            self._silences.failed(address, owner)
        else:
            self._silences.answered(address)

    def _lose(self, peer: Peer) -> None:
        if self.knows(peer):
            self.lost += 1
            self._drop(peer)

    def _drop(self, peer: Peer) -> None:
        self._known = {address: each for address, each in self._known.items() if each is not peer}
        self._detach(peer.peer_id)
        # Calls under way end by themselves: cut off, they would look like their task's cancellation.
        task = asyncio.create_task(peer.channel.close(CALL_TIMEOUT_S))
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)

    def _detach_stray(self, peer_id: str) -> None:
        """Disconnect from a peer that has been dropped, unless it has been met again meanwhile."""
        if self._by_id(peer_id) is None:
            self._detach(peer_id)

    def _peers(self) -> list[Peer]:
        return list({peer.peer_id: peer for peer in self._known.values()}.values())

    def _by_id(self, peer_id: str) -> Peer | None:
        return next((peer for peer in self._known.values() if peer.peer_id == peer_id), None)

    @asynccontextmanager
    async def _calling(self, peer: Peer) -> AsyncIterator[None]:
        """Turn a failed call into an error of ours, and draw the conclusions about its peer."""
        try:
            with cut_off_as_lost(peer.address):
                yield
        except grpc.aio.UsageError as exc:
            # Another call has lost the peer, and closed its channel, before this one began.
            raise PeerUnavailable(f"{peer.address} was lost") from exc
        except grpc.aio.AioRpcError as exc:
            error = translated(exc, peer.address)
            error.__cause__ = exc
            if is_gone(error):
                self._lose(peer)
            elif exc.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
                self._count_timeout(peer)
            raise error from exc
        peer.num_timeouts = 0

    def _count_timeout(self, peer: Peer) -> None:
        peer.num_timeouts += 1
        if peer.num_timeouts == NUM_TIMEOUTS_TO_PROBE:
            self._in_background(self._probe(peer), "probe-peer")

    async def _probe(self, peer: Peer) -> None:
        """Drop a peer that does not even shake hands, or is another by now."""
        try:
            is_same = await self._greeter.who_is_at(peer.address) == peer.peer_id
        except MeshError as exc:
            if not self.knows(peer):
                return
            log.warning("%s is given up: %s", peer.peer_id, exc.message)
            is_same = False
            if isinstance(exc, PeerUnavailable):
                self._silences.failed(peer.address, peer.peer_id)
        peer.num_timeouts = 0
        if not is_same:
            self._lose(peer)

    async def _renew(self) -> None:
        """Renew running transfers while there are any."""
        while True:
            await asyncio.sleep(RENEW_INTERVAL_S)
            busy = [peer for peer in self._peers() if peer.transfers]
            if not busy:
                return
            await asyncio.gather(*(renew(peer, self._secret, self._calling) for peer in busy))

    def _in_background(self, work: Coroutine[object, object, None], name: str) -> asyncio.Task[None]:
        task = asyncio.create_task(work, name=name)
        self._background.add(task)
        task.add_done_callback(self._background.discard)
        return task
