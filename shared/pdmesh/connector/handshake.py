"""The handshake with an owner: who answers at an address, whether the two sides can exchange KV, and over which connector.

It says who the owner is *now*: a process that came back at the same address has another epoch, and none of the memory.
"""

import asyncio
import contextlib
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Iterator
from dataclasses import dataclass, field

import grpc
import grpc.aio

from pdmesh.channels import OWN_CONNECTION, open_channel
from pdmesh.connector.active import ERROR_PREFIX, PullEnd
from pdmesh.connector.base import PeerPool, Way
from pdmesh.connector.damages import Damages
from pdmesh.connector.owner import check_names, check_pools
from pdmesh.connector.publications import PUBLISHING
from pdmesh.errors import HandshakeRefused, MeshError, PeerUnavailable
from pdmesh.protocol import mesh_pb2 as pb
from pdmesh.protocol import mesh_pb2_grpc
from pdmesh.protocol.capabilities import OWN, Capabilities, capabilities_from_pb, capabilities_to_pb
from pdmesh.protocol.exchange import Exchange, KVDescription, KVNames, description_to_pb, names_from_pb
from pdmesh.protocol.layout import Layout
from pdmesh.protocol.version import PROTOCOL_MIN, PROTOCOL_VERSION, agree
from pdmesh.security import MeshSecret
from pdmesh.turns import Turns

log = logging.getLogger(__name__)

GRPC_CONNECTOR = "grpc"
# A healthy owner answers in milliseconds: this bounds what a dead one costs.
HANDSHAKE_TIMEOUT_S = 5.0
# Addresses come and go with their pods; a fallback at one that is forgotten here is told again.
MAX_LOGGED = 1024

Attach = Callable[[PeerPool, str], Awaitable[None]]
"""Connects the named connector's worker half to a pool; raises HandshakeRefused or PeerUnavailable when it cannot."""


@dataclass(slots=True, kw_only=True, eq=False)
class Peer:
    """An owner that this process has shaken hands with and attached to."""

    peer_id: str
    address: str
    connector: str
    """The one in use, unless it fails."""
    protocol: int
    capabilities: Capabilities
    num_blocks: int
    block_bytes: int
    names: KVNames
    exchange: Exchange
    """What becomes of its blocks here."""
    layouts: tuple[Layout, ...]
    """Of its blocks, where they are not those of the pool here."""
    channel: grpc.aio.Channel
    stub: "mesh_pb2_grpc.KVPeerAsyncStub"
    attached: set[str] = field(default_factory=set)
    """Connectors: the one in use, and those that were used when it had failed."""
    attaching: asyncio.Lock = field(default_factory=asyncio.Lock)
    transfers: set[str] = field(default_factory=set)
    """Running ones, renewed until they end."""
    coming: set[str] = field(default_factory=set)
    """Of those, the ones that the owner may not have begun yet: that it does not know them says nothing."""
    num_timeouts: int = 0
    """Calls in a row that got no answer in their time."""
    num_errors: int = 0
    """Transfers in a row that their connector failed."""
    regain_due_s: float | None = None
    """When a better connector is tried again, on the monotonic clock; None: not now."""
    regain_pause_s: float = 0.0

    def track(self, transfer_id: str, *, is_coming: bool) -> None:
        """Renew a transfer from now on."""
        self.transfers.add(transfer_id)
        if is_coming:
            self.coming.add(transfer_id)

    def untrack(self, transfer_id: str) -> None:
        """A transfer has ended here; unknown ones are ignored."""
        self.transfers.discard(transfer_id)
        self.coming.discard(transfer_id)

    def fails(self, committed: bool, reason: str) -> bool:
        """Note the end of a transfer; whether it tells that the peer's memory cannot be read any more.

        What one connector says of one transfer may be that transfer's own fault, a damaged file for one: others that run are
        not given up for it, but when the next fails in the same way.
        """
        if committed:
            self.num_errors = 0
        self.num_errors += reason.startswith(ERROR_PREFIX)
        is_repeated = self.num_errors > 1 or not self.transfers
        return not committed and (
            reason.startswith(PullEnd.PEER_LOST) or (reason.startswith(ERROR_PREFIX) and is_repeated)
        )

    def renewed(self, ended: Iterable[str]) -> None:
        """The owner has renewed all but these, which it does not know, or not any more."""
        self.transfers.difference_update(set(ended) - self.coming)


@dataclass(frozen=True, slots=True, kw_only=True)
class Greeting:
    """What an owner answered to a handshake, and what follows from it here."""

    reply: pb.HandshakeReply
    names: KVNames
    exchange: Exchange
    layouts: tuple[Layout, ...]
    """Of the owner's blocks, where they are not those of the pool here."""


def make_peer(
    greeting: Greeting,
    address: str,
    connector: str,
    channel: grpc.aio.Channel,
    stub: "mesh_pb2_grpc.KVPeerAsyncStub",
) -> Peer:
    """Make the entry of an owner that has answered and is attached over a connector."""
    reply = greeting.reply
    return Peer(
        peer_id=reply.peer_id,
        address=address,
        connector=connector,
        attached={connector},
        protocol=reply.protocol,
        capabilities=capabilities_from_pb(reply.capabilities),
        num_blocks=reply.num_blocks,
        block_bytes=reply.block_bytes,
        names=greeting.names,
        exchange=greeting.exchange,
        layouts=greeting.layouts,
        channel=channel,
        stub=stub,
    )


class Greeter:
    """Shakes hands for one consumer. `block_bytes`, one per layout, lets the tier make its arena for that layout."""

    def __init__(
        self,
        peer_id: str,
        secret: MeshSecret,
        connectors: list[str],
        model_fingerprint: str,
        layout_fingerprints: list[str],
        attach: Attach,
        *,
        block_bytes: list[int],
        description: KVDescription | None = None,
    ) -> None:
        self.fallbacks: Counter[str] = Counter()
        """Times a connector could not be used and the next one was, by the name of the one that could not."""
        self.damages = Damages()
        self._peer_id = peer_id
        self._secret = secret
        self._connectors = connectors
        self._names = KVNames(
            model_fingerprint=model_fingerprint,
            layout_fingerprints=tuple(layout_fingerprints),
            description=description,
            capabilities=OWN,
        )
        self._attach = attach
        self._block_bytes = block_bytes
        self._logged: dict[tuple[str, str], None] = {}
        self.turns = Turns()
        """Of those who attach a peer, by its id: met under two names at once it would be two peers of one id, and who loses one
        of them detaches both."""

    async def who_is_at(self, address: str) -> str:
        """Learn the peer id of who listens at an address now. Raises as `ask`.

        Over a new connection: one that was refused goes on refusing until its back-off ends, whoever listens there by then.
        """
        channel, stub = open_stub(address, self._secret)
        try:
            return (await self.ask(stub, address)).reply.peer_id
        finally:
            await channel.close(None)

    async def ask(
        self, stub: "mesh_pb2_grpc.KVPeerAsyncStub", address: str, deadline_s: float = HANDSHAKE_TIMEOUT_S
    ) -> "Greeting":
        """Learn who answers. Raises HandshakeRefused when its KV is of no use here, or PeerUnavailable."""
        request = pb.HandshakeRequest(
            peer_id=self._peer_id,
            protocol_min=PROTOCOL_MIN,
            protocol_max=PROTOCOL_VERSION,
            capabilities=capabilities_to_pb(OWN),
            layout_fingerprints=self._names.layout_fingerprints,
            model_fingerprint=self._names.model_fingerprint,
            kv=description_to_pb(self._names.description),
            block_bytes=self._block_bytes,
        )
        try:
            with cut_off_as_lost(address):
                reply: pb.HandshakeReply = await stub.Handshake(
                    request, timeout=min(HANDSHAKE_TIMEOUT_S, deadline_s), metadata=self._secret.call_metadata()
                )
        except grpc.aio.UsageError as exc:
            # The peer was lost, and its channel closed, before the question was put.
            raise PeerUnavailable(f"{address} was lost") from exc
        except grpc.aio.AioRpcError as exc:
            raise translated(exc, address) from exc
        agree(reply.protocol, reply.protocol, peer=reply.peer_id)
        check_pools(capabilities_from_pb(reply.capabilities), OWN, reply.peer_id)
        names = names_from_pb(reply)
        exchange = check_names((reply.peer_id, names), (self._peer_id, self._names))
        told = names.description
        are_same = names.layout_fingerprints == self._names.layout_fingerprints
        layouts = () if told is None or are_same else told.layouts
        return Greeting(reply=reply, names=names, exchange=exchange, layouts=layouts)

    def after(self, connector: str) -> list[str]:
        """Return this side's connectors that come after one, in order of preference; all of them after an empty name."""
        return self._connectors[self._connectors.index(connector) + 1 :] if connector else self._connectors

    def before(self, connector: str) -> list[str]:
        """Return this side's connectors that come before one, in order of preference."""
        return self._connectors[: self._connectors.index(connector)]

    async def attach_better(self, address: str, greeting: "Greeting", connector: str) -> str:
        """Attach by the first connector that works of those before one; returns its name, or nothing when none does."""
        for name in self.before(connector):
            try:
                await self._attach_over(name, address, greeting)
            except (HandshakeRefused, PeerUnavailable) as exc:
                log.debug("connector %s still cannot reach %s: %s", name, address, exc.message)
            else:
                return name
        return ""

    async def attach_first(self, address: str, greeting: "Greeting", after: str = "") -> str:
        """Attach by the first connector that both sides have and that works, of those after `after`; returns its name.

        Raises HandshakeRefused, naming what is wrong with each, when none does.
        """
        failures = []
        for name in self.after(after):
            try:
                await self._attach_over(name, address, greeting)
            except (HandshakeRefused, PeerUnavailable) as exc:
                failures.append(f"{name}: {exc.message}")
                self.count_fallback(name, address, exc)
            else:
                return name
        why = "; ".join(failures) or f"there is none after {after}"
        raise HandshakeRefused(f"no connector reaches {greeting.reply.peer_id} at {address} ({why})")

    async def _attach_over(self, name: str, address: str, greeting: "Greeting") -> None:
        """Attach by one connector. Raises HandshakeRefused or PeerUnavailable."""
        reply = greeting.reply
        offered = {each.connector: each.metadata for each in reply.connectors}
        # The grpc connector reads from where this handshake was answered.
        offered |= {GRPC_CONNECTOR: address.encode()} if GRPC_CONNECTOR in offered else {}
        if name not in offered:
            raise HandshakeRefused("the peer does not offer it")
        if self.damages.is_given_up(reply.peer_id, name):
            raise HandshakeRefused("what came over it was damaged on the way")
        pool = PeerPool(
            peer_id=reply.peer_id,
            metadata=offered[name],
            num_blocks=reply.num_blocks,
            block_bytes=reply.block_bytes,
            layouts=greeting.layouts,
            others=tuple(
                Way(connector=each, metadata=offered[each])
                for each in self.after(name)
                # A copy would have to be asked for before it is read.
                if each in offered and each not in PUBLISHING
            ),
        )
        await self._attach(pool, name)

    def count_fallback(self, name: str, address: str, error: MeshError) -> None:
        """Note that the next connector is used instead of one."""
        self.fallbacks[name] += 1
        if (name, address) not in self._logged:
            self._logged[name, address] = None
            if len(self._logged) > MAX_LOGGED:
                del self._logged[next(iter(self._logged))]
            log.warning("connector %s is not used for the KV of %s, but the next one: %s", name, address, error.message)


def open_stub(address: str, secret: MeshSecret) -> "tuple[grpc.aio.Channel, mesh_pb2_grpc.KVPeerAsyncStub]":
    """Make a channel to an owner and its stub; nothing connects yet."""
    # A connection of its own: another channel's, from when nobody listened there, refuses until its back-off is over.
    channel = open_channel(address, secret, OWN_CONNECTION)
    return channel, mesh_pb2_grpc.KVPeerStub(channel)


def is_gone(error: MeshError) -> bool:
    """Whether a failed call says that its peer cannot be used any more; a call that merely took too long does not."""
    if isinstance(error, HandshakeRefused):
        return True
    cause = error.__cause__
    if isinstance(cause, grpc.aio.UsageError):
        return True
    return isinstance(cause, grpc.aio.AioRpcError) and cause.code() is grpc.StatusCode.UNAVAILABLE


@contextlib.contextmanager
def cut_off_as_lost(address: str) -> Iterator[None]:
    """Raise PeerUnavailable for a call that ends as its channel is closed, by whoever lost the peer meanwhile: grpc makes it look
    like the cancellation of the task that waits, which nobody would then hear of."""
    try:
        yield
    except asyncio.CancelledError:
        if (task := asyncio.current_task()) is None or task.cancelling():
            raise
        raise PeerUnavailable(f"{address} was lost during a call") from None


def translated(error: grpc.aio.AioRpcError, address: str) -> MeshError:
    """Say in our terms why a call to a peer failed."""
    code, details = error.code(), error.details() or ""
    if code is grpc.StatusCode.FAILED_PRECONDITION:
        return HandshakeRefused(details)
    if code is grpc.StatusCode.UNAUTHENTICATED:
        return HandshakeRefused(f"{address} refused this service: {details}")
    return PeerUnavailable(f"{address} failed: {code.name.lower()} {details}".rstrip())
