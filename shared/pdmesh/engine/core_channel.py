"""The server's two ZMQ sockets to its core, joined to the asyncio loop without a task or a copy per message."""

import asyncio
import contextlib
import os
import secrets

import zmq

from pdmesh.engine.incoming import Incoming
from pdmesh.engine.messages import FromCore, ToCore, encode, from_core_decoder


class CoreChannel:
    """Bound sockets under unguessable abstract names, open to this user's processes only. Belongs to the running loop."""

    def __init__(self) -> None:
        self._context = zmq.Context()
        # The server must never wait for its core; requests in flight are bounded where they are admitted.
        self._to_core = self._bind(zmq.PUSH, high_water_mark=0)
        self._from_core = self._bind(zmq.PULL, high_water_mark=1000)
        self._incoming = Incoming(from_core_decoder, "core")
        self._event = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(int(self._from_core.getsockopt(zmq.FD)), self._notice)

    @property
    def to_core_address(self) -> str:
        return self._to_core.getsockopt_string(zmq.LAST_ENDPOINT)

    @property
    def from_core_address(self) -> str:
        return self._from_core.getsockopt_string(zmq.LAST_ENDPOINT)

    @property
    def num_dropped(self) -> int:
        """Messages that could not be decoded."""
        return self._incoming.num_dropped

    def send(self, message: ToCore) -> None:
        """Hand a message over; never blocks. Without a core at the other end, or after `close`, it goes nowhere."""
        if self._to_core.closed:
            return
        with contextlib.suppress(zmq.Again):
            self._to_core.send(encode(message), zmq.NOBLOCK)

    def receive(self) -> FromCore | None:
        """Return the next message, or None when there is none now."""
        with contextlib.suppress(zmq.Again):
            while True:
                message = self._incoming.decode(self._from_core.recv(zmq.NOBLOCK))
                if message is not None:
                    return message
        return None

    async def readable(self) -> None:
        """Return when `receive` may have something again, or after `wake`."""
        self._event.clear()
        if self._has_message():
            return
        await self._event.wait()

    def wake(self) -> None:
        """Let `readable` return."""
        self._event.set()

    def close(self) -> None:
        """Close both sockets; what was not sent by now is lost."""
        self._loop.remove_reader(int(self._from_core.getsockopt(zmq.FD)))
        self._context.destroy(linger=0)

    def _notice(self) -> None:
        # The descriptor only says that something happened; asking for the events also resets it.
        if self._has_message():
            self._event.set()

    def _has_message(self) -> bool:
        return bool(int(self._from_core.getsockopt(zmq.EVENTS)) & zmq.POLLIN)

    def _bind(self, kind: int, *, high_water_mark: int) -> "zmq.Socket[bytes]":
        bound = self._context.socket(kind)
        bound.set_hwm(high_water_mark)
        # Abstract names have no file permissions: the kernel tells who connects.
        bound.setsockopt(zmq.IPC_FILTER_UID, os.getuid())
        bound.bind(f"ipc://@pdmesh-{secrets.token_hex(16)}")
        return bound
