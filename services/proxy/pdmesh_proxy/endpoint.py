"""One engine address: keeps a session open, with backoff between attempts, for as long as the address is listed."""

import asyncio
import contextlib
import logging
import random
import time
from collections.abc import Callable, Iterator

from pdmesh.breaker import Breaker, BreakerState
from pdmesh.errors import DeadlineExceeded, MeshError, PeerUnavailable
from pdmesh.security import MeshSecret
from pdmesh_proxy.control_stream import can_keep
from pdmesh_proxy.discovery import Listed
from pdmesh_proxy.engine_session import EngineSession, SessionSettings, open_session
from pdmesh_proxy.metrics import ProxyMetrics
from pdmesh_proxy.offers import HeldOffer, HeldOffers

log = logging.getLogger(__name__)

FIRST_BACKOFF_S = 0.1
LAST_BACKOFF_S = 2.0
# One may be the request's own bad luck, or an engine that was killed and is started again.
NUM_FAILURES_TO_REST = 3


class Endpoint:
    """The engine at one address, whichever process that is at the moment."""

    def __init__(
        self,
        address: str,
        *,
        settings: SessionSettings,
        secret: MeshSecret,
        metrics: ProxyMetrics,
        on_change: Callable[[], None],
    ) -> None:
        self.address = address
        self.listed: frozenset[Listed] = frozenset()
        self.session: EngineSession | None = None
        """The open session once the engine has answered on it, else None."""
        self.tried = False
        """Whether the engine has answered or failed to, once."""
        self.last_used = 0
        """Grows with each request sent anywhere; the smallest was used longest ago."""
        self._breaker = Breaker(threshold=NUM_FAILURES_TO_REST)
        self._failed_s = 0.0
        """When the last failure was that the breaker counted; monotonic."""
        self._is_rest_told = False
        self._settings, self._secret, self._metrics, self._on_change = settings, secret, metrics, on_change
        self._offers = HeldOffers()
        self._connected: EngineSession | None = None
        self._peer_id = ""
        self._unwanted = asyncio.Event()
        self._complaint = ""

    @property
    def problem(self) -> str:
        """Why there is no session, once that is known; empty while there is one."""
        return self._complaint if self.session is None else ""

    def want(self, listed: frozenset[Listed]) -> None:
        """The address is listed; `listed` says under which roles."""
        self.listed = listed
        self._unwanted.clear()
        if self._connected is not None:
            self._connected.closing = False

    def unwant(self) -> None:
        """The address is not listed any more: nothing new; what runs there may end."""
        self._unwanted.set()
        if self._connected is not None:
            self._connected.closing = True
            self._connected.control.wake()

    @property
    def unwanted(self) -> bool:
        return self._unwanted.is_set()

    @property
    def resting(self) -> bool:
        """Whether so many legs failed here in a row that other engines come first, but for a probe now and then."""
        return not self._breaker.admits

    @contextlib.contextmanager
    def judged(self, session: EngineSession) -> Iterator[None]:
        """Learn from how a leg over a session of this engine ends."""
        began_s = time.monotonic()
        is_probe = self._breaker.admit() and self._breaker.state is BreakerState.HALF_OPEN
        try:
            yield
        except PeerUnavailable:
            self._failed(began_s)
            raise
        except DeadlineExceeded:
            # The request may have had little time. An engine that gave nobody a token for so long is at fault.
            if session.was_silent(began_s, self._settings.heartbeat_timeout_s):
                self._failed(began_s)
            elif is_probe:
                self._breaker.gave_up()
            raise
        except BaseException:
            # What else ends a leg is no fault of the engine's: its client left, or it is full.
            if is_probe:
                self._breaker.gave_up()
            raise
        self._succeeded()

    def answered(self) -> None:
        """A leg's first token came: a probe need not end before others are let in."""
        if self._breaker.state is BreakerState.HALF_OPEN:
            self._succeeded()

    def _failed(self, began_s: float) -> None:
        """Count a leg's failure. Legs that ran side by side, as when a session breaks or a core dies, are one fault."""
        if began_s >= self._failed_s:
            self._failed_s = time.monotonic()
            self._breaker.failed()
            self._tell_rest()

    def _succeeded(self) -> None:
        self._breaker.succeeded()
        self._tell_rest()

    def _tell_rest(self) -> None:
        """Log and count that the engine rests, and that it does no more."""
        rests = self._breaker.state is not BreakerState.CLOSED
        if rests == self._is_rest_told:
            return
        self._is_rest_told = rests
        self._metrics.engines_resting.inc(1 if rests else -1)
        if rests:
            self._metrics.engine_rests.inc()
            log.warning(
                "%s rests: %d requests in a row failed there; others come first, one request at a time asks it again",
                self.address,
                NUM_FAILURES_TO_REST,
            )
        else:
            log.info("%s is used again", self.address)

    def keep(self, offer: HeldOffer) -> bool:
        """Hold an offer a while longer although decode has its KV; False when that is not wanted."""
        if self._connected is None or not self._settings.keep_offers_s or not can_keep(self._connected.control.load):
            return False
        self._offers.keep(offer, self._settings.keep_offers_s)
        return True

    def need(self, offer: HeldOffer) -> None:
        """An offer that was only kept is to be fetched again."""
        self._offers.need(offer)

    def release(self, offer: HeldOffer) -> None:
        """Give an offer back; without a session its lease ends it."""
        if self._offers.release(offer) and self._connected is not None:
            self._connected.control.wake()

    async def run(self) -> None:
        """Keep a session open until the address is no longer wanted and the last request has ended."""
        try:
            await self._keep_connected()
        finally:
            if self._is_rest_told:
                self._metrics.engines_resting.dec()

    async def _keep_connected(self) -> None:
        backoff_s = FIRST_BACKOFF_S
        while not self.unwanted:
            try:
                await self._connect_once()
            except MeshError as exc:
                self._complain(exc.message)
            except Exception:
                # A defect here must cost this session, not the proxy.
                log.exception("the session with %s failed", self.address)
                self._metrics.stream_breaks.inc()
            else:
                continue
            finally:
                had_answered, self.tried = self.session is not None, True
                self._connected = self.session = None
                self._on_change()
            backoff_s = FIRST_BACKOFF_S if had_answered else min(2 * backoff_s, LAST_BACKOFF_S)
            with contextlib.suppress(TimeoutError):
                # Jitter keeps proxies that lost the same engine from coming back in step.
                async with asyncio.timeout(backoff_s * random.uniform(0.5, 1.0)):
                    await self._unwanted.wait()

    async def _connect_once(self) -> None:
        async with open_session(
            self.address,
            settings=self._settings,
            offers=self._offers,
            secret=self._secret,
            metrics=self._metrics,
            on_change=self._session_changed,
        ) as session:
            if self._peer_id and session.peer_id != self._peer_id:
                log.info("engine at %s was started anew: %s, was %s", self.address, session.peer_id, self._peer_id)
                self._offers.lost(session.peer_id)
            self._peer_id = session.peer_id
            self._connected = session
            session.closing = self.unwanted
            await session.run()

    def _session_changed(self) -> None:
        session = self._connected
        if session is not None and session.control.answered and not session.broken and self.session is None:
            self.session, self.tried = session, True
            self._complaint = ""
            log.info(
                "engine %s (%s) at %s joined: it serves %s, model fingerprint %s",
                session.info.engine_id,
                session.info.role,
                self.address,
                session.info.model,
                session.info.model_fingerprint,
            )
        self._on_change()

    def _complain(self, message: str) -> None:
        """Log why there is no session, once per reason."""
        if message != self._complaint:
            self._complaint = message
            log.warning("no session with %s: %s", self.address, message)
