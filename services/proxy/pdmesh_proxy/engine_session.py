"""One session with one engine: its data stream, its control stream, and the requests that run over them.

The reader always drains. A session ends when either stream breaks or the engine stays silent too long; then every request
on it is told so, and the endpoint opens a new session.
"""

import asyncio
import contextlib
import logging
import secrets
import time
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NoReturn

import grpc
import grpc.aio

from pdmesh.errors import Draining, InternalError, MeshError, PeerUnavailable, Unauthorized
from pdmesh.lifecycle import GRPC_OPTIONS
from pdmesh.protocol import mesh_pb2 as pb
from pdmesh.protocol.mesh_pb2_grpc import EngineStub
from pdmesh.protocol.messages import GenerateRequest
from pdmesh.protocol.ticket import unseal
from pdmesh.protocol.version import agree
from pdmesh.protocol.wire import delta_from_pb, request_to_pb
from pdmesh.security import MeshSecret
from pdmesh_proxy.metrics import ProxyMetrics
from pdmesh_proxy.offers import HeldOffers
from pdmesh_proxy.stream import ALL_CHOICES, Leg, LegEnd

if TYPE_CHECKING:
    from pdmesh.protocol.mesh_pb2_grpc import EngineAsyncStub

log = logging.getLogger(__name__)

SESSION_METADATA_KEY = "pdmesh-session"
# Prompts are gathered into one frame up to about this many token ids, well below GRPC_MAX_MESSAGE_BYTES.
MAX_FRAME_TOKENS = 1 << 21


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionSettings:
    """How a session waits."""

    connect_timeout_s: float
    heartbeat_interval_s: float
    heartbeat_timeout_s: float
    buffer_tokens: int


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
        self.load = pb.LoadReport()
        self.num_sequences = 0
        """Choices that run here for this proxy."""
        self.waiting_tokens = 0
        """Prompt tokens of requests from this proxy that the engine has not answered yet."""
        self.closing = False
        """Set when the engine has left the mesh: nothing new, and the session ends with its last request."""
        self.answered = False
        """Whether the engine has been heard on the control stream; until then nothing is sent to it."""
        self.broken = False
        self._data, self._control = data, control
        self._settings, self._offers, self._secret, self._metrics = settings, offers, secret, metrics
        self._legs: dict[str, Leg] = {}
        self._submits: list[GenerateRequest] = []
        self._submit_wake = asyncio.Event()
        self._aborts: list[pb.AbortChoice] = []
        self._control_wake = asyncio.Event()
        self._on_change = on_change
        self._last_heard_s = time.monotonic()

    @property
    def peer_id(self) -> str:
        return f"{self.info.engine_id}@{self.info.epoch}"

    @property
    def idle(self) -> bool:
        """Whether no request runs and no offer is held here."""
        return not self._legs and not self._offers

    def submit(self, request: GenerateRequest) -> Leg:
        """Send a request; never blocks. Raises PeerUnavailable when the session has broken, Draining when it takes no more."""
        if self.broken:
            raise PeerUnavailable(f"engine {self.info.engine_id} at {self.address} is gone")
        if self.closing or self.load.draining:
            raise Draining(f"engine {self.info.engine_id} at {self.address} is shutting down")
        leg = Leg(
            request,
            buffer_tokens=self._settings.buffer_tokens,
            on_abort=self._abort,
            on_started=self._leg_started,
            on_closed=self._leg_closed,
        )
        self._legs[request.request_id] = leg
        self.num_sequences += len(request.choices)
        self.waiting_tokens += len(request.token_ids)
        self._submits.append(request)
        self._submit_wake.set()
        return leg

    def wake_control(self) -> None:
        """Send what is pending for the control stream now rather than with the next ping."""
        self._control_wake.set()

    async def run(self) -> None:
        """Pump both streams until one breaks. Raises MeshError with the cause; all legs have been told by then."""
        cause: MeshError | None = None
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._read_data())
                tasks.create_task(self._write_data())
                tasks.create_task(self._read_control())
                tasks.create_task(self._write_control())
        except* SessionClosed:
            pass
        except* MeshError as group:
            cause = _first_leaf(group)
        finally:
            self.broken = True
            # A drained engine ends its streams when it owes nothing any more.
            expected = self.load.draining and not self._legs
            for leg in list(self._legs.values()):
                leg.lost(cause or PeerUnavailable(f"the session with {self.address} was closed"))
            self._on_change()
        if cause is not None:
            self._metrics.stream_breaks.inc(not expected)
            raise cause

    # ---- data ----------------------------------------------------------------------------------

    async def _read_data(self) -> NoReturn:
        with _translated(self.address):
            async for frame in self._data:
                for message in frame.deltas:
                    leg = self._legs.get(message.request_id)
                    if leg is not None:
                        leg.put(delta_from_pb(message))
                    else:
                        self._take_orphan(message)
        raise PeerUnavailable(f"engine {self.info.engine_id} at {self.address} ended its data stream")

    async def _write_data(self) -> NoReturn:
        while True:
            await self._submit_wake.wait()
            self._submit_wake.clear()
            while self._submits:
                frame = pb.SubmitFrame(requests=map(request_to_pb, self._take_submits()))
                with _translated(self.address):
                    await self._data.write(frame)

    def _take_submits(self) -> list[GenerateRequest]:
        taken: list[GenerateRequest] = []
        num_tokens = 0
        while self._submits and (not taken or num_tokens + len(self._submits[0].token_ids) <= MAX_FRAME_TOKENS):
            request = self._submits.pop(0)
            num_tokens += len(request.token_ids)
            if request.request_id in self._legs:
                taken.append(request)
        return taken

    def _take_orphan(self, message: pb.ChoiceDelta) -> None:
        """Handle a delta that was on its way when its client left.

        An offer that comes so is given back. The two streams are not ordered, so the abort may have overtaken its request:
        it is said again.
        """
        if message.ticket:
            with contextlib.suppress(MeshError):
                self._offers.release_unheld(unseal(message.ticket, self._secret).offer_id)
                self.wake_control()
        elif not message.finish_reason and not message.HasField("error"):
            self._abort(message.request_id, ALL_CHOICES)

    # ---- control -------------------------------------------------------------------------------

    async def _read_control(self) -> NoReturn:
        with _translated(self.address):
            async for down in self._control:
                self._last_heard_s = time.monotonic()
                before = (self.answered, self.load.draining)
                self.answered = True
                if down.HasField("load"):
                    self.load = down.load
                if before != (True, self.load.draining):
                    self._on_change()
                for offer_id in down.ended_offers:
                    self._offers.ended(offer_id)
        raise PeerUnavailable(f"engine {self.info.engine_id} at {self.address} ended its control stream")

    async def _write_control(self) -> NoReturn:
        """Send a ping and the held offers with every beat, and what cannot wait in between."""
        loop = asyncio.get_running_loop()
        next_beat_s, num_pings = loop.time(), 0
        while True:
            beat = loop.time() >= next_beat_s
            if beat:
                self._check_beat()
                num_pings += 1
                next_beat_s = loop.time() + self._settings.heartbeat_interval_s
            aborts, self._aborts = self._aborts, []
            up = pb.ControlUp(
                aborts=aborts,
                renew_offers=self._offers.held if beat else (),
                release_offers=self._offers.take_released(),
                ping=num_pings if beat else 0,
            )
            try:
                with _translated(self.address):
                    async with asyncio.timeout(self._settings.heartbeat_timeout_s):
                        await self._control.write(up)
            except TimeoutError:
                self._raise_silent()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout_at(next_beat_s):
                    await self._control_wake.wait()
            self._control_wake.clear()

    def _check_beat(self) -> None:
        if self.closing and self.idle:
            raise SessionClosed
        if time.monotonic() - self._last_heard_s > self._settings.heartbeat_timeout_s:
            self._raise_silent()

    def _raise_silent(self) -> NoReturn:
        raise PeerUnavailable(
            f"engine {self.info.engine_id} at {self.address} has not answered for "
            f"{self._settings.heartbeat_timeout_s:g} s"
        )

    # ---- what legs report ----------------------------------------------------------------------

    def _abort(self, request_id: str, choice: int) -> None:
        self._aborts.append(pb.AbortChoice(request_id=request_id, choice=choice))
        self.wake_control()

    def _leg_started(self, leg: Leg) -> None:
        self.waiting_tokens -= len(leg.request.token_ids)

    def _leg_closed(self, leg: Leg, end: LegEnd) -> None:
        del self._legs[leg.request.request_id]
        self.num_sequences -= len(leg.request.choices)
        if not leg.started:
            self.waiting_tokens -= len(leg.request.token_ids)
        if end is LegEnd.ABORT:
            self._abort(leg.request.request_id, ALL_CHOICES)


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
    # A pool of its own makes every session a fresh connection, with no backoff left over from an earlier one.
    options: list[tuple[str, Any]] = [*GRPC_OPTIONS, ("grpc.use_local_subchannel_pool", 1)]
    session_id = secrets.token_hex(8)
    metadata = grpc.aio.Metadata(*secret.call_metadata(), (SESSION_METADATA_KEY, session_id))
    async with grpc.aio.insecure_channel(address, options=options) as channel:
        stub: EngineAsyncStub = EngineStub(channel)
        with _translated(address):
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


@contextlib.contextmanager
def _translated(address: str) -> Iterator[None]:
    """Turn what gRPC raises into the error tree."""
    try:
        yield
    except grpc.aio.AioRpcError as exc:
        detail = exc.details() or exc.code().name
        if exc.code() is grpc.StatusCode.UNAUTHENTICATED:
            raise Unauthorized(f"engine at {address} refuses this proxy: {detail}") from exc
        raise PeerUnavailable(f"engine at {address} cannot be reached: {detail}") from exc
    except (asyncio.InvalidStateError, grpc.aio.UsageError) as exc:
        raise PeerUnavailable(f"the stream to the engine at {address} has ended") from exc
    except grpc.aio.InternalError as exc:
        raise InternalError(f"gRPC failed towards {address}: {exc}") from exc


def _first_leaf(group: BaseExceptionGroup[MeshError]) -> MeshError:
    first = group.exceptions[0]
    return _first_leaf(first) if isinstance(first, BaseExceptionGroup) else first
