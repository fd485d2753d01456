"""The way from the proxy to each engine: a relay of TCP connections that can be cut, and that can be slow for a while."""

from __future__ import annotations

import asyncio
import contextlib
import random
import threading

DELAY_S = 0.5
LOST_SHARE = 0.1
RESEND_S = (0.2, 0.4, 0.8)
"""Linux sends a packet again after 200 ms at least, and after twice as long when that is lost too."""
PIECE_BYTES = 1 << 16


class Link:
    """One relay. Its port stays; where it leads to changes with the engine's starts."""

    def __init__(self) -> None:
        self.port = 0
        self.target = 0
        """gRPC port of the engine's present start."""
        self.slow = False
        self.lossy = False
        self._writers: set[asyncio.StreamWriter] = set()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Pass one connection on until either end closes it."""
        try:
            far_reader, far_writer = await asyncio.open_connection("127.0.0.1", self.target)
        except OSError:
            writer.transport.abort()
            return
        ends = {writer, far_writer}
        self._writers |= ends
        try:
            await asyncio.gather(self._pass_on(reader, far_writer), self._pass_on(far_reader, writer))
        finally:
            self._writers -= ends
            for end in ends:
                end.transport.abort()

    def cut(self) -> None:
        """Break all connections."""
        for writer in self._writers:
            writer.transport.abort()

    async def _pass_on(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while piece := await reader.read(PIECE_BYTES):
                if self.slow:
                    await asyncio.sleep(DELAY_S)
                if self.lossy and random.random() < LOST_SHARE:
                    await asyncio.sleep(random.choice(RESEND_S))
                writer.write(piece)
                await writer.drain()
        writer.close()


class Links:
    """Relays by name, all on one thread."""

    def __init__(self, names: tuple[str, ...]) -> None:
        self._links = {name: Link() for name in names}
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="links", daemon=True)
        self._thread.start()
        asyncio.run_coroutine_threadsafe(self._listen(), self._loop).result(10)

    def __getitem__(self, name: str) -> Link:
        return self._links[name]

    def cut(self, name: str) -> None:
        """Break all connections to an engine."""
        self._loop.call_soon_threadsafe(self._links[name].cut)

    def close(self) -> None:
        """Break everything and end the thread."""
        asyncio.run_coroutine_threadsafe(self._end(), self._loop).result(10)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    async def _listen(self) -> None:
        self._servers = []
        for link in self._links.values():
            server = await asyncio.start_server(link.serve, "127.0.0.1", 0)
            link.port = server.sockets[0].getsockname()[1]
            self._servers.append(server)

    async def _end(self) -> None:
        for server in self._servers:
            server.close()
        for link in self._links.values():
            link.cut()
        others = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
        if others:
            await asyncio.wait(others, timeout=5)
