"""Redis or Valkey as a bounded store of values: fetch, write, remove, each one pipelined round trip.

Both servers speak the same commands here. The size bound is ours, kept by a script on the server so that several kvcache
services may share one: a sorted set orders the values by last use, a hash has their sizes and their sum. It only ever
over-counts (what expired or was evicted by `maxmemory` leaves the book when its time to live is over).
"""

import asyncio
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from types import TracebackType
from typing import Any, Self
from urllib.parse import urlsplit

import redis.asyncio as redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import OutOfMemoryError, ReadOnlyError, RedisError, WatchError
from redis.exceptions import TimeoutError as RedisTimeoutError

from pdmesh.errors import ConfigError, PeerError, PeerUnavailable
from pdmesh_kvcache.config import KVCacheConfig
from pdmesh_kvcache.value import NAMESPACE

INDEX_KEY = f"{NAMESPACE}index"
SIZES_KEY = f"{NAMESPACE}sizes"
SCHEMES = ("redis", "rediss", "unix")
MAX_CONNECTIONS = 8
# Values are megabytes: fewer, larger reads.
SOCKET_READ_BYTES = 1 << 17
DROP_ONLY = -1

# ARGV: what all names begin with, time to live (ms), most bytes, then name and size of each value that is about to be written
# or was used; size -1: that value was removed. The book is rebuilt from the values when its sum is missing (evicted by
# `maxmemory`, say), and from all values there are when its keys are of a wrong type: else every write would be refused.
_BOOK_SCRIPT = """
local index, sizes = KEYS[1], KEYS[2]
local ttl_ms, max_bytes = tonumber(ARGV[2]), tonumber(ARGV[3])
local clock = redis.call('TIME')
local now_ms = clock[1] * 1000 + math.floor(clock[2] / 1000)
local function type_of(name)
  return redis.call('TYPE', name)['ok']
end
local function is_broken(name, wanted)
  local found = type_of(name)
  return found ~= wanted and found ~= 'none'
end
if is_broken(index, 'zset') or is_broken(sizes, 'hash') then
  redis.call('UNLINK', index, sizes)
  local cursor = '0'
  repeat
    local page = redis.call('SCAN', cursor, 'MATCH', ARGV[1] .. '*', 'COUNT', 1000)
    cursor = page[1]
    for _, name in ipairs(page[2]) do redis.call('ZADD', index, now_ms, name) end
  until cursor == '0'
end
local total = tonumber(redis.call('HGET', sizes, 'total') or -1) or -1
if total < 0 then
  total = 0
  for _, name in ipairs(redis.call('ZRANGE', index, 0, -1)) do
    local size = type_of(name) == 'string' and redis.call('STRLEN', name) or 0
    if size == 0 then redis.call('ZREM', index, name) else redis.call('HSET', sizes, name, size) end
    total = total + size
  end
end
local function drop(name)
  total = total - (tonumber(redis.call('HGET', sizes, name) or 0) or 0)
  redis.call('HDEL', sizes, name)
  redis.call('ZREM', index, name)
end
for _, name in ipairs(redis.call('ZRANGEBYSCORE', index, '-inf', now_ms - ttl_ms, 'LIMIT', 0, 1000)) do
  drop(name)
end
for i = 4, #ARGV, 2 do
  drop(ARGV[i])
  local size = tonumber(ARGV[i + 1])
  if size >= 0 then
    redis.call('ZADD', index, now_ms, ARGV[i])
    redis.call('HSET', sizes, ARGV[i], size)
    total = total + size
  end
end
while total > max_bytes do
  local oldest = redis.call('ZRANGE', index, 0, 0)[1]
  if not oldest then break end
  redis.call('UNLINK', oldest)
  drop(oldest)
end
redis.call('HSET', sizes, 'total', total)
return total
"""


_LONGEST_SCRIPT = """
local longest = 0
for _, name in ipairs(KEYS) do
  if redis.call('TYPE', name).ok == 'string' then
    longest = math.max(longest, redis.call('STRLEN', name))
  end
end
return longest
"""

# Read of a value beyond what it may have: enough to tell one of another layout, which is copied, from one that is cut.
SPARE_BYTES = 1024


class ValkeyRefused(PeerError):
    """The server is there but says no to this command (no permission, wrong type)."""


class ValkeyNotWritable(ValkeyRefused):
    """The server is there and can be read, but takes no write now: its disk or its memory is full, or it is a replica."""


# A disk that failed, no memory, a replica, too few replicas. What a script of ours was told comes after words of the script's.
_NOT_WRITABLE = re.compile(r"\b(MISCONF|OOM|READONLY|NOREPLICAS)\b")


class Valkey:
    """A client with a bounded pool of connections. Every call raises PeerUnavailable or ValkeyRefused and takes at most
    the configured timeout."""

    def __init__(self, config: KVCacheConfig) -> None:
        self.shown_url = _without_password(config.valkey)
        """For logs."""
        self._timeout_s = config.valkey_timeout_s
        self._ttl_ms = config.valkey_ttl_s * 1000
        self._max_bytes = config.valkey_max_bytes
        self._client = _make_client(config, self.shown_url)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._client.aclose()

    async def ping(self) -> None:
        """Return when the server answers. Raises ValkeyNotWritable when it says that it takes no writes."""
        async with self._translated():
            await self._client.ping()

    async def require(self) -> None:
        """Return when the server answers now, be it only to reads; raises ConfigError with the remedies when it does not."""
        try:
            await self.ping()
        except ValkeyNotWritable:
            # Its disk may have room again at any time; `backing` tells meanwhile.
            return
        except PeerError as exc:
            raise ConfigError(
                f"valkey: {self.shown_url} cannot be used: {exc.message}; start it, fix --valkey, or pass "
                "--no-valkey-required to start without it and connect when it comes"
            ) from exc

    async def fetch(self, names: list[str], most_bytes: int) -> list[bytes | None]:
        """Read values; None for each that is not there. Of a longer one than `most_bytes`, little more is read: whoever
        can write to the server cannot fill our memory."""
        async with self._translated():
            # Parts are read half as fast as whole values (measured: 16 MB in 28 ms, not 15), so that only what is too long is.
            async with self._client.pipeline() as pipe:
                await pipe.watch(*names)
                if await pipe.eval(_LONGEST_SCRIPT, len(names), *names) <= most_bytes + SPARE_BYTES:
                    pipe.multi()  # type: ignore[no-untyped-call]
                    pipe.mget(names)
                    with suppress(WatchError):
                        whole: list[list[bytes | None]] = await pipe.execute()
                        return whole[0]
            return await self._fetch_parts(names, most_bytes + SPARE_BYTES)

    async def _fetch_parts(self, names: list[str], most_bytes: int) -> list[bytes | None]:
        async with self._client.pipeline(transaction=False) as pipe:
            for name in names:
                pipe.getrange(name, 0, most_bytes - 1)
                # What is not there reads as an empty string.
                pipe.exists(name)
            answers: list[Any] = await pipe.execute(raise_on_error=False)
            return [_value(*pair) for pair in zip(answers[::2], answers[1::2], strict=True)]

    async def write(self, values: dict[str, bytes]) -> None:
        """Store values with their time to live, after making room for them; together at most the size bound."""
        async with self._translated(), self._client.pipeline(transaction=False) as pipe:
            self._book(pipe, {name: len(value) for name, value in values.items()})
            for name, value in values.items():
                pipe.set(name, value, px=self._ttl_ms)
            await pipe.execute()

    async def refresh(self, sizes: dict[str, int]) -> None:
        """Count values as just used: their time to live begins again and they are removed later. With none: a write that
        changes nothing."""
        async with self._translated(), self._client.pipeline(transaction=False) as pipe:
            self._book(pipe, sizes)
            for name in sizes:
                pipe.pexpire(name, self._ttl_ms)
            await pipe.execute()

    async def remove(self, names: list[str]) -> None:
        """Delete values."""
        async with self._translated(), self._client.pipeline(transaction=False) as pipe:
            pipe.unlink(*names)
            self._book(pipe, dict.fromkeys(names, DROP_ONLY))
            await pipe.execute()

    def _book(self, pipe: Any, sizes: dict[str, int]) -> None:
        pairs = [part for name, size in sizes.items() for part in (name, size)]
        pipe.eval(_BOOK_SCRIPT, 2, INDEX_KEY, SIZES_KEY, NAMESPACE, self._ttl_ms, self._max_bytes, *pairs)

    @asynccontextmanager
    async def _translated(self) -> AsyncIterator[None]:
        try:
            async with asyncio.timeout(self._timeout_s):
                yield
        except (RedisConnectionError, RedisTimeoutError, OSError) as exc:
            raise PeerUnavailable(str(exc) or f"no answer within {self._timeout_s:g} s") from exc
        except RedisError as exc:
            raise (ValkeyNotWritable if _is_about_writing(exc) else ValkeyRefused)(str(exc)) from exc


def _is_about_writing(exc: RedisError) -> bool:
    # In front of its answer the client repeats our command.
    answer = str(exc).rpartition("caused error: ")[2]
    return isinstance(exc, ReadOnlyError | OutOfMemoryError) or _NOT_WRITABLE.search(answer) is not None


def _make_client(config: KVCacheConfig, shown_url: str) -> "redis.Redis":
    """Parse the URL. Raises ConfigError when it is not one; whether somebody answers there is seen later."""
    remedy = "give redis://host:port/db, rediss://host:port/db or unix:///path"
    if urlsplit(config.valkey).scheme not in SCHEMES:
        raise ConfigError(f"valkey: {shown_url!r} is not the URL of a Redis or Valkey server; {remedy}")
    try:
        pool = redis.BlockingConnectionPool.from_url(
            config.valkey,
            max_connections=MAX_CONNECTIONS,
            timeout=config.valkey_timeout_s,
            socket_timeout=config.valkey_timeout_s,
            socket_connect_timeout=config.valkey_timeout_s,
            socket_read_size=SOCKET_READ_BYTES,
            # The breaker in `backing` decides when to try again.
            retry=Retry(NoBackoff(), 0),
            # The oldest protocol: nothing here needs more, and every server and proxy has it.
            protocol=2,
            client_name="pdmesh-kvcache",
        )
        # Arguments of a connection are checked only when one is made.
        pool.make_connection()  # type: ignore[no-untyped-call]
    except (ValueError, TypeError, RedisError) as exc:
        raise ConfigError(f"valkey: {shown_url!r} cannot be used: {exc}; {remedy}") from exc
    return redis.Redis.from_pool(pool)


def _value(answer: bytes | Exception, exists: int | Exception) -> bytes | None:
    """Return a string; None when there is none, as where something else has its name. Raises what else went wrong."""
    if isinstance(answer, Exception) and not str(answer).startswith("WRONGTYPE"):
        raise answer
    if isinstance(exists, Exception):
        raise exists
    return answer if exists and isinstance(answer, bytes) else None


def _without_password(url: str) -> str:
    parts = urlsplit(url)
    if not parts.netloc.rpartition("@")[0]:
        return url
    return parts._replace(netloc="***@" + parts.netloc.rpartition("@")[2]).geturl()
