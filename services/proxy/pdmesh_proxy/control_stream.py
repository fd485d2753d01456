"""The control stream of a session: aborts and leases down, load and liveness up."""

import asyncio
import contextlib
import time
from collections.abc import Callable
from typing import NoReturn

import grpc.aio

from pdmesh.errors import PeerUnavailable
from pdmesh.protocol import mesh_pb2 as pb
from pdmesh_proxy.grpc_errors import translated
from pdmesh_proxy.offers import KEEP_KV_USAGE, HeldOffers

Call = grpc.aio.StreamStreamCall[pb.ControlUp, pb.ControlDown]


# A broken connection ends the stream by itself; pings find engines that hang, and one at rest keeps nobody waiting.
IDLE_INTERVALS = 5


class ControlStream:
    """Sends a ping and the held offers with every beat, and what cannot wait in between. One of a session."""

    def __init__(
        self,
        address: str,
        call: "Call",
        *,
        offers: HeldOffers,
        interval_s: float,
        timeout_s: float,
        on_change: Callable[[], None],
        on_beat: Callable[[], None],
        is_idle: Callable[[], bool],
    ) -> None:
        self.load = pb.LoadReport()
        self.answered = False
        """Whether the engine has been heard; until then nothing is sent to it."""
        self._address, self._call, self._offers = address, call, offers
        self._interval_s, self._timeout_s = interval_s, timeout_s
        self._on_change, self._on_beat, self._is_idle = on_change, on_beat, is_idle
        self._aborts: list[pb.AbortChoice] = []
        self._withdrawn: list[str] = []
        self._wake = asyncio.Event()
        self._drains = asyncio.Event()
        self._unanswered_since_s: float | None = None

    def abort(self, request_id: str, choice: int) -> None:
        """Stop a choice, or with ALL_CHOICES a request."""
        self._aborts.append(pb.AbortChoice(request_id=request_id, choice=choice))
        self.wake()

    def withdraw(self, offer_id: str) -> None:
        """Expect a push no longer."""
        self._withdrawn.append(offer_id)
        self.wake()

    def wake(self) -> None:
        """Send what is pending now rather than with the next beat, and beat faster from now on unless idle."""
        self._wake.set()

    async def drains(self) -> float:
        """Return when the engine shuts down, with the seconds that what runs there has."""
        await self._drains.wait()
        return self.load.drain_remaining_ms / 1000

    async def read(self) -> None:
        """Take what the engine says until it ends the stream. Raises PeerUnavailable when the stream breaks."""
        with translated(self._address):
            async for down in self._call:
                self._unanswered_since_s = None
                before = (self.answered, self.load.draining)
                self.answered = True
                if down.HasField("load"):
                    self.load = down.load
                    if down.load.draining and down.load.drain_remaining_ms:
                        self._drains.set()
                    if not can_keep(down.load) and self._offers.release_kept():
                        self.wake()
                if before != (True, self.load.draining):
                    self._on_change()
                for offer_id in down.ended_offers:
                    self._offers.ended(offer_id)

    async def write(self) -> NoReturn:
        """Beat. Raises PeerUnavailable when the stream breaks or the engine stays silent, and whatever `on_beat` raises."""
        loop = asyncio.get_running_loop()
        next_beat_s, num_pings = loop.time(), 0
        while True:
            beat = loop.time() >= next_beat_s
            if beat:
                self._check_heard(late_s=loop.time() - next_beat_s)
                self._on_beat()
                num_pings += 1
                next_beat_s = loop.time() + self._interval_s * IDLE_INTERVALS
                self._unanswered_since_s = self._unanswered_since_s or time.monotonic()
            if not self._is_idle():
                next_beat_s = min(next_beat_s, loop.time() + self._interval_s)
            await self._send(self._next_message(num_pings if beat else 0))
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout_at(next_beat_s):
                    await self._wake.wait()
            self._wake.clear()

    def _next_message(self, ping: int) -> pb.ControlUp:
        aborts, self._aborts = self._aborts, []
        self._offers.release_kept(overdue_only=True)
        withdrawn, self._withdrawn = self._withdrawn, []
        return pb.ControlUp(
            withdraw_expectations=withdrawn,
            aborts=aborts,
            renew_offers=self._offers.held if ping else (),
            release_offers=self._offers.take_released(),
            ping=ping,
        )

    async def _send(self, message: pb.ControlUp) -> None:
        try:
            with translated(self._address):
                async with asyncio.timeout(self._timeout_s):
                    await self._call.write(message)
        except TimeoutError:
            self._raise_silent()

    def _check_heard(self, late_s: float) -> None:
        if self._unanswered_since_s is None:
            return
        if late_s > self._interval_s:
            # This process slept, and could not have heard anything.
            self._unanswered_since_s = time.monotonic()
        if time.monotonic() - self._unanswered_since_s > self._timeout_s:
            self._raise_silent()

    def _raise_silent(self) -> NoReturn:
        raise PeerUnavailable(f"engine at {self._address} has not answered for {self._timeout_s:g} s")


def can_keep(load: pb.LoadReport) -> bool:
    """Whether an engine has room for KV that is kept in case it is needed again."""
    return load.kv_usage < KEEP_KV_USAGE and not load.draining
