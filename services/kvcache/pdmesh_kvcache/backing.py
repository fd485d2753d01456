"""Whether Redis or Valkey can be used right now: a breaker around its client.

Closed while it answers. The first failure opens it: calls are refused at once, one line is logged, and a keeper pings
with growing pauses (half open) until an answer closes it again. While closed, the keeper pings now and then, so that
a server that died in a quiet hour is known to be down before the next request asks it.
"""

import asyncio
import logging
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from prometheus_client import Histogram

from pdmesh.errors import DeadlineExceeded, PeerError, PeerUnavailable
from pdmesh_kvcache.metrics import Metrics
from pdmesh_kvcache.valkey import Valkey

log = logging.getLogger(__name__)

CHECK_INTERVAL_S = 5.0
FIRST_PAUSE_S = 0.2
LAST_PAUSE_S = 5.0


class Backing:
    """Guarded access to the store behind the arenas; with `valkey` None there is none, and it is never up."""

    def __init__(self, valkey: Valkey | None, metrics: Metrics) -> None:
        self._valkey = valkey
        self._metrics = metrics
        self._shown_url = "" if valkey is None else valkey.shown_url
        self._up = False
        # What was logged and has not got better since: a kind of call that is refused, or "" for being down.
        self._reported: set[str] = set()
        self._check = asyncio.Event()

    @property
    def exists(self) -> bool:
        """Whether one is configured."""
        return self._valkey is not None

    @property
    def up(self) -> bool:
        """Whether it answered when it was last asked."""
        return self._up

    async def fetch(self, names: list[str], most_bytes: int, timeout_s: float) -> list[bytes | None]:
        """Read values, of each little more than `most_bytes` at most. Raises DeadlineExceeded after `timeout_s`, PeerError, also
        when the breaker is open."""
        async with self._guarded("fetch", self._metrics.fetch_seconds) as valkey:
            try:
                async with asyncio.timeout(timeout_s):
                    values = await valkey.fetch(names, most_bytes)
            except TimeoutError:
                # The caller's patience ended, not the server's time; but the server may be why.
                self._check.set()
                raise DeadlineExceeded("the lookup's time was over") from None
        self._metrics.read_bytes.inc(sum(len(value) for value in values if value is not None))
        return values

    async def write(self, values: dict[str, bytes]) -> None:
        """Store values. Raises PeerError, also when the breaker is open."""
        async with self._guarded("write", self._metrics.write_seconds) as valkey:
            await valkey.write(values)
        self._metrics.written_bytes.inc(sum(map(len, values.values())))

    async def refresh(self, sizes: dict[str, int]) -> None:
        """Count values as just used. Raises PeerError, also when the breaker is open."""
        async with self._guarded("refresh") as valkey:
            await valkey.refresh(sizes)

    async def remove(self, names: list[str]) -> None:
        """Delete values. Raises PeerError, also when the breaker is open."""
        async with self._guarded("remove") as valkey:
            await valkey.remove(names)

    async def check(self) -> None:
        """Ping once and set the breaker accordingly."""
        if self._valkey is None:
            return
        try:
            await self._valkey.ping()
        except PeerError as exc:
            self._metrics.errors.labels("ping").inc()
            self._set_down(exc)
        else:
            self._set_up()

    async def run(self) -> None:
        """Keep the breaker; ends at once when there is no store."""
        pause_s = FIRST_PAUSE_S
        while self.exists:
            await self.check()
            pause_s = FIRST_PAUSE_S if self._up else min(2 * pause_s, LAST_PAUSE_S)
            self._check.clear()
            try:
                async with asyncio.timeout(CHECK_INTERVAL_S if self._up else pause_s):
                    await self._check.wait()
            except TimeoutError:
                pass

    @asynccontextmanager
    async def _guarded(self, kind: str, seconds: Histogram | None = None) -> AsyncIterator[Valkey]:
        if self._valkey is None or not self._up:
            raise PeerUnavailable("Redis or Valkey is down")
        started_s = time.monotonic()
        try:
            yield self._valkey
        except PeerError as exc:
            self._metrics.errors.labels(kind).inc()
            if isinstance(exc, PeerUnavailable):
                self._set_down(exc)
            elif kind not in self._reported:
                self._reported.add(kind)
                log.warning("%s refused a %s: %s", self._shown_url, kind, exc.message)
            raise
        self._reported.discard(kind)
        if seconds is not None:
            seconds.observe(time.monotonic() - started_s)

    def _set_up(self) -> None:
        if not self._up:
            log.info("blocks are kept in %s", self._shown_url)
        self._up = True
        self._reported.discard("")
        self._metrics.backing_up.set(1)

    def _set_down(self, exc: PeerError) -> None:
        if "" not in self._reported:
            log.warning("%s is down, going on without it: %s", self._shown_url, exc.message)
        self._up = False
        self._reported.add("")
        self._metrics.backing_up.set(0)
        self._check.set()
