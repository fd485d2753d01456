"""Whether Redis or Valkey can be used right now: a breaker around its client.

Closed while it answers. The first failure opens it: calls are refused at once, one line is logged, and a keeper pings
with growing pauses (half open) until an answer closes it again. While closed, the keeper pings now and then, so that
a server that died in a quiet hour is known to be down before the next request asks it.

One that is up may take no writes (a full disk or memory, a replica): it is read as before, writes are refused here, and the
keeper tries at each ping a write that changes nothing.
"""

import asyncio
import logging
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from prometheus_client import Histogram

from pdmesh.errors import DeadlineExceeded, PeerError, PeerUnavailable
from pdmesh_kvcache.metrics import Metrics
from pdmesh_kvcache.valkey import Valkey, ValkeyNotWritable, ValkeyRefused

log = logging.getLogger(__name__)

CHECK_INTERVAL_S = 5.0
FIRST_PAUSE_S = 0.2
LAST_PAUSE_S = 5.0
_FETCH = "fetch"
_DOWN = "being down"
_NO_WRITES = "taking no writes"


class Backing:
    """Guarded access to the store behind the arenas; with `valkey` None there is none, and it is never up."""

    def __init__(self, valkey: Valkey | None, metrics: Metrics) -> None:
        self._valkey = valkey
        self._metrics = metrics
        self._shown_url = "" if valkey is None else valkey.shown_url
        self._up = False
        self._writable = False
        # What was logged and has not got better since: a kind of call that is refused, _DOWN or _NO_WRITES.
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

    @property
    def writable(self) -> bool:
        """Whether it is up and takes writes, as far as known."""
        return self._up and self._writable

    async def fetch(self, names: list[str], most_bytes: int, timeout_s: float) -> list[bytes | None]:
        """Read values, of each little more than `most_bytes` at most. Raises DeadlineExceeded after `timeout_s`, PeerError, also
        when the breaker is open."""
        async with self._guarded(_FETCH, self._metrics.fetch_seconds) as valkey:
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
        """Ping once, try to write unless the last write went well, and set the breaker accordingly."""
        if self._valkey is None:
            return
        try:
            await self._ask(self._valkey)
        except ValkeyNotWritable as exc:
            self._metrics.errors.labels("ping").inc()
            self._set_not_writable(exc)
        except PeerError as exc:
            self._metrics.errors.labels("ping").inc()
            self._set_down(exc)
            return
        # Last: who sees that it is up may write at once.
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

    async def _ask(self, valkey: Valkey) -> None:
        """Raises ValkeyNotWritable where it can be read only, another PeerError where it cannot be used at all."""
        await valkey.ping()
        if self._writable:
            return
        try:
            await valkey.refresh({})
        except ValkeyRefused as exc:
            raise ValkeyNotWritable(exc.message) from exc
        self._set_writable()

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
            elif isinstance(exc, ValkeyNotWritable) and kind != _FETCH:
                self._set_not_writable(exc)
            elif kind not in self._reported:
                self._reported.add(kind)
                log.warning("%s refused a %s: %s", self._shown_url, kind, exc.message)
            raise
        self._reported.discard(kind)
        # Others of its calls may have failed meanwhile.
        if kind != _FETCH and self._up:
            self._set_writable()
        if seconds is not None:
            seconds.observe(time.monotonic() - started_s)

    def _set_up(self) -> None:
        if not self._up:
            log.info("blocks are kept in %s", self._shown_url)
        self._up = True
        self._reported.discard(_DOWN)
        self._metrics.backing_up.set(1)

    def _set_writable(self) -> None:
        if _NO_WRITES in self._reported:
            log.info("%s takes writes again", self._shown_url)
        self._writable = True
        self._reported.discard(_NO_WRITES)
        self._metrics.backing_writable.set(1)

    def _set_not_writable(self, exc: PeerError) -> None:
        if _NO_WRITES not in self._reported:
            log.warning("%s takes no writes, blocks in it are still read: %s", self._shown_url, exc.message)
        self._writable = False
        self._reported.add(_NO_WRITES)
        self._metrics.backing_writable.set(0)

    def _set_down(self, exc: PeerError) -> None:
        if _DOWN not in self._reported:
            log.warning("%s is down, going on without it: %s", self._shown_url, exc.message)
        self._up = False
        # By when it is back, this may have changed.
        self._writable = False
        self._reported.add(_DOWN)
        self._metrics.backing_up.set(0)
        self._metrics.backing_writable.set(0)
        self._check.set()
