"""Asks a service over HTTP whether it can serve."""

import asyncio
import contextlib

TIMEOUT_S = 2.0
RETRY_S = 0.05


async def until_healthy(host: str, port: int) -> None:
    """Return when the service can serve; the deadline is the caller's.

    The proxy's /health is the only thing that says it has reached the engines, so it is asked until it does.
    """
    while True:
        if await is_healthy(host, port):
            return
        await asyncio.sleep(RETRY_S)


async def is_healthy(host: str, port: int) -> bool:
    """Whether GET /health answers 200; False as well when nobody listens. Waits at most TIMEOUT_S."""
    target = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    try:
        async with asyncio.timeout(TIMEOUT_S):
            reader, writer = await asyncio.open_connection(target, port)
            try:
                writer.write(b"GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
                status = (await reader.readline()).split()
                return len(status) > 1 and status[1] == b"200"
            finally:
                writer.close()
                with contextlib.suppress(OSError):
                    await writer.wait_closed()
    except (OSError, TimeoutError):
        return False
