"""One session with one engine: its data stream, its control stream, and the requests that run over them.

The reader always drains. A session ends when either stream breaks or the engine stays silent too long; then every request
on it is told so, and the endpoint opens a new session.
"""

import asyncio
import contextlib
import logging
import secrets
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, NoReturn

import grpc.aio

from pdmesh.channels import OWN_CONNECTION, open_channel
from pdmesh.errors import Draining, MeshError, PeerUnavailable
from pdmesh.openai.intake.size import num_listed_ids
from pdmesh.protocol import mesh_pb2 as pb
from pdmesh.protocol.exchange import names_from_pb
from pdmesh.protocol.mesh_pb2_grpc import EngineStub
from pdmesh.protocol.messages import ChoiceDelta, GenerateRequest
from pdmesh.protocol.pushes import Expectation, expectation_to_pb
from pdmesh.protocol.ticket import unseal
from pdmesh.protocol.version import agree
from pdmesh.protocol.wire import delta_from_pb, request_to_pb
from pdmesh.security import MeshSecret
from pdmesh_proxy.control_stream import ControlStream
from pdmesh_proxy.grpc_errors import translated
from pdmesh_proxy.metrics import ProxyMetrics
from pdmesh_proxy.nonsense import nonsense
from pdmesh_proxy.offers import HeldOffer, HeldOffers
from pdmesh_proxy.stream import ALL_CHOICES, Leg, LegEnd

if TYPE_CHECKING:
    from pdmesh.protocol.mesh_pb2_grpc import EngineAsyncStub

log = logging.getLogger(__name__)

SESSION_METADATA_KEY = "pdmesh-session"
# Requests are gathered into one frame up to about this many token ids, well below GRPC_MAX_MESSAGE_BYTES.
MAX_FRAME_TOKENS = 1 << 21
# An engine that ends both streams ends the data stream first, but what lies there is read frame by frame.
LAST_FRAMES_S = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionSettings:
    """How a session waits."""

    connect_timeout_s: float
    heartbeat_interval_s: float
    heartbeat_timeout_s: float
    buffer_tokens: int
    keep_offers_s: float = 0.0


class SessionClosed(Exception):
    """The session was ended on our side: the engine left the mesh and nothing runs on it any more."""


class EngineSession:
    """Requests out, deltas in. Made by `open_session`; `run` lives until the session breaks."""

    def __init__(
        self,
        address: str,
        session_id: str,
        info: pb.EngineInfo,
        data: "grpc.aio.StreamStreamCall[pb.SubmitFrame, pb.StepFrame]",
        control: "grpc.aio.StreamStreamCall[pb.ControlUp, pb.ControlDown]",
        *,
        settings: SessionSettings,
        offers: HeldOffers,
        secret: MeshSecret,
        metrics: ProxyMetrics,
        on_change: Callable[[], None],
    ) -> None:
        self.address, self.session_id, self.info = address, session_id, info
        self.names = names_from_pb(info)
        self.num_sequences = 0
        """Choices that run here for this proxy."""
        self.waiting_tokens = 0
        """Prompt tokens of requests from this proxy that the engine has not answered yet."""
        self.closing = False
        """Set when the engine has left the mesh: nothing new, and the session ends with its last request."""
        self.broken = False
        self.control = ControlStream(
            address,
            control,
            offers=offers,
            interval_s=settings.heartbeat_interval_s,
            timeout_s=settings.heartbeat_timeout_s,
            on_change=on_change,
            on_beat=self._end_when_left,
            is_idle=lambda: not (self.closing or self._legs or self._offers),
        )
        self._data = data
        self._settings, self._offers, self._secret, self._metrics = settings, offers, secret, metrics
        self._legs: dict[str, Leg] = {}
        self._submits: list[GenerateRequest] = []
        self._expectations: list[Expectation] = []
        self._submit_wake = asyncio.Event()
        self._data_read = asyncio.Event()
        """Set when the engine has ended its data stream and all of it was read."""
        self._on_change = on_change
        self._last_token_s = 0.0

    def was_silent(self, since_s: float, at_least_s: float) -> bool:
        """Whether no request of this session has had a token since a monotonic time at least so long ago."""
        return self._last_token_s < since_s <= time.monotonic() - at_least_s

    @property
    def peer_id(self) -> str:
        return f"{self.info.engine_id}@{self.info.epoch}"

    def submit(self, request: GenerateRequest) -> Leg:
        """Send a request; never blocks. Raises PeerUnavailable when the session has broken, Draining when it takes no more."""
        if self.broken:
            raise PeerUnavailable(f"engine {self.info.engine_id} at {self.address} is gone")
        if self.closing or self.control.load.draining:
            raise Draining(f"engine {self.info.engine_id} at {self.address} is shutting down")
        leg = Leg(
            request,
            buffer_tokens=self._settings.buffer_tokens,
            on_abort=self.control.abort,
            on_started=self._leg_started,
            on_closed=self._leg_closed,
        )
        if not self._legs:
            # The control stream may be at its pace for idle engines.
            self.control.wake()
        self._legs[request.request_id] = leg
        self.num_sequences += len(request.choices)
        self.waiting_tokens += _num_waiting(request)
        self._submits.append(request)
        self._submit_wake.set()
        return leg

    def expect(self, expectation: Expectation) -> None:
        """Tell the engine to expect a push; never blocks. Raises PeerUnavailable when the session has broken."""
        if self.broken:
            raise PeerUnavailable(f"engine {self.info.engine_id} at {self.address} is gone")
        self._expectations.append(expectation)
        self._submit_wake.set()

    def withdraw(self, offer_id: str) -> None:
        """Tell the engine to expect a push no longer. With a broken session all that it was told is over."""
        self._expectations = [each for each in self._expectations if each.offer_id != offer_id]
        if not self.broken:
            self.control.withdraw(offer_id)

    async def run(self) -> None:
        """Pump both streams until one breaks. Raises MeshError with the cause; all legs have been told by then."""
        cause: MeshError | None = None
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._read_data())
                tasks.create_task(self._write_data())
                tasks.create_task(self._read_control())
                tasks.create_task(self.control.write())
                tasks.create_task(self._hand_over())
        except* SessionClosed:
            pass
        except* MeshError as group:
            cause = _first_leaf(group)
        finally:
            self.broken = True
            # A drained engine ends its streams when it owes nothing any more.
            expected = self.control.load.draining and not self._legs
            for leg in list(self._legs.values()):
                leg.lost(cause or PeerUnavailable(f"the session with {self.address} was closed"))
            self._on_change()
        if cause is not None:
            self._metrics.stream_breaks.inc(not expected)
            raise cause

    async def _hand_over(self) -> None:
        """When the engine shuts down: move what will not end in time, at once and after half of that time.

        While it serves its KV to whoever goes on there; requests that nobody else can take stay.
        """
        drain_s = await self.control.drains()
        until_s = time.monotonic() + drain_s
        for wait_s in (0.0, drain_s / 2):
            await asyncio.sleep(wait_s)
            left_s = until_s - time.monotonic()
            # Without a rate yet it may be about to begin: the first time it gets its chance.
            for leg in [each for each in self._legs.values() if wait_s or each.started or each.request.awaits]:
                if not leg.ends_within(left_s):
                    leg.move(Draining(f"engine {self.info.engine_id} at {self.address} is shutting down"))

    async def _read_control(self) -> NoReturn:
        await self.control.read()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(LAST_FRAMES_S):
                await self._data_read.wait()
        raise PeerUnavailable(f"engine {self.info.engine_id} at {self.address} ended its control stream")

    # ---- data ----------------------------------------------------------------------------------

    async def _read_data(self) -> NoReturn:
        with translated(self.address):
            async for frame in self._data:
                for message in frame.deltas:
                    if message.token_ids:
                        self._last_token_s = time.monotonic()
                    leg = self._legs.get(message.request_id)
                    if leg is not None:
                        self._put(leg, delta_from_pb(message))
                    else:
                        self._take_orphan(message)
        self._data_read.set()
        raise PeerUnavailable(f"engine {self.info.engine_id} at {self.address} ended its data stream")

    def _put(self, leg: Leg, delta: ChoiceDelta) -> None:
        if problem := nonsense(delta, self.info.vocab_size):
            leg.give_up(PeerUnavailable(f"engine {self.info.engine_id} at {self.address} is not well: {problem}"))
            self._give_back(delta.ticket)
        elif not leg.put(delta):
            self._give_back(delta.ticket)
        elif delta.ticket:
            # From now on: its lease runs while a slow client has not read of it.
            leg.unread_offer = self._hold(delta.ticket)

    async def _write_data(self) -> NoReturn:
        while True:
            await self._submit_wake.wait()
            self._submit_wake.clear()
            while frame := self._next_frame():
                with translated(self.address):
                    await self._data.write(frame)

    def _next_frame(self) -> pb.SubmitFrame | None:
        """What there is to send, in frames of bounded size; None when there is nothing."""
        if self._expectations:
            # One to a frame: each is as long as its prompt.
            return pb.SubmitFrame(expectations=[expectation_to_pb(self._expectations.pop(0))])
        requests = self._take_submits()
        return pb.SubmitFrame(requests=map(request_to_pb, requests)) if requests else None

    def _take_submits(self) -> list[GenerateRequest]:
        """The next frame's requests, less those that have ended meanwhile."""
        taken: list[GenerateRequest] = []
        num_tokens = 0
        while self._submits and (not taken or num_tokens + _num_ids(self._submits[0]) <= MAX_FRAME_TOKENS):
            request = self._submits.pop(0)
            num_tokens += _num_ids(request)
            if request.request_id in self._legs:
                taken.append(request)
        return taken

    def _take_orphan(self, message: pb.ChoiceDelta) -> None:
        """Handle a delta that was on its way when its client left.

        An offer that comes so is given back. The two streams are not ordered, so the abort may have overtaken its request:
        it is said again.
        """
        if message.ticket:
            self._give_back(message.ticket)
        elif not message.finish_reason and not message.HasField("error"):
            self.control.abort(message.request_id, ALL_CHOICES)

    def _hold(self, sealed: bytes) -> HeldOffer | None:
        """Renew an offer until it is released; None for a ticket that cannot be used."""
        try:
            ticket = unseal(sealed, self._secret)
        except MeshError as error:
            # The request goes on without it, as if prefill had made none.
            log.warning("a ticket of %s cannot be used: %s", self.info.engine_id, error.message)
            return None
        offer = HeldOffer(offer_id=ticket.offer_id, ticket=sealed, peer_id=ticket.peer_id)
        self._offers.hold(offer)
        return offer

    def _give_back(self, sealed: bytes) -> None:
        """Release the offer of a ticket that nobody reads; there may be none."""
        if sealed:
            with contextlib.suppress(MeshError):
                self._offers.release_unheld(unseal(sealed, self._secret).offer_id)
                self.control.wake()

    # ---- what legs and the beat report ---------------------------------------------------------

    def _end_when_left(self) -> None:
        if self.closing and not self._legs and not self._offers:
            raise SessionClosed

    def _leg_started(self, leg: Leg) -> None:
        self.waiting_tokens -= _num_waiting(leg.request)

    def _leg_closed(self, leg: Leg, end: LegEnd) -> None:
        del self._legs[leg.request.request_id]
        self.num_sequences -= len(leg.request.choices)
        if not leg.started:
            self.waiting_tokens -= _num_waiting(leg.request)
        if (offer := leg.take_offer()) is not None and self._offers.release(offer):
            self.control.wake()
        if end is LegEnd.ABORT:
            self.control.abort(leg.request.request_id, ALL_CHOICES)


@contextlib.asynccontextmanager
async def open_session(
    address: str,
    *,
    settings: SessionSettings,
    offers: HeldOffers,
    secret: MeshSecret,
    metrics: ProxyMetrics,
    on_change: Callable[[], None],
) -> AsyncIterator[EngineSession]:
    """Connect, ask the engine what it is, open both streams. Raises MeshError when any of it fails in time."""
    session_id = secrets.token_hex(8)
    metadata = grpc.aio.Metadata(*secret.call_metadata(), (SESSION_METADATA_KEY, session_id))
    # A pool of its own makes every session a fresh connection, with no backoff left over from an earlier one.
    async with open_channel(address, secret, OWN_CONNECTION) as channel:
        stub: EngineAsyncStub = EngineStub(channel)
        with translated(address):
            info = await stub.Describe(pb.DescribeRequest(), metadata=metadata, timeout=settings.connect_timeout_s)
        agree(info.protocol_min, info.protocol_max, peer=f"engine {info.engine_id} at {address}")
        yield EngineSession(
            address,
            session_id,
            info,
            stub.Generate(metadata=metadata),  # type: ignore[call-arg]
            stub.Control(metadata=metadata),  # type: ignore[call-arg]
            settings=settings,
            offers=offers,
            secret=secret,
            metrics=metrics,
            on_change=on_change,
        )


def _num_waiting(request: GenerateRequest) -> int:
    """Prompt tokens that the engine may have to compute: none of one that another computes."""
    return 0 if request.awaits is not None else len(request.token_ids)


def _num_ids(request: GenerateRequest) -> int:
    """How much of a frame the request takes, in token ids: not only the prompt is long."""
    listed = num_listed_ids(request.sampling)
    return len(request.token_ids) + listed + len(request.choices) + sum(map(len, request.emitted))


def _first_leaf(group: BaseExceptionGroup[MeshError]) -> MeshError:
    first = group.exceptions[0]
    return _first_leaf(first) if isinstance(first, BaseExceptionGroup) else first
