"""Publishes the core's KV events over ZMQ as vLLM does, and sends again what a consumer has missed.

Every batch goes out as (topic, sequence number, batch) at once; numbers start at 0 and have no gaps. A consumer that was too
slow, or came late, sees a gap and asks the replay socket from a number on: (topic, number, batch) for each batch that is
still kept, then ("", -1, ""). Numbers are 8 bytes, big-endian.
"""

import asyncio
import logging
from collections import deque
from types import TracebackType

import zmq
import zmq.asyncio

from pdmesh.engine.kv_events_config import KVEventsConfig, bind, binds

log = logging.getLogger(__name__)

END_OF_REPLAY = (-1).to_bytes(8, "big", signed=True)
# Requests are 8 bytes; subscriptions are topics.
MAX_REQUEST_BYTES = 1024
# Between two slices of a replay the loop serves others.
SLICE = 64


class KVEventPublisher:
    """An async context manager around the two sockets, for one event loop."""

    endpoint: str
    """Where consumers find the events, once entered."""
    replay_endpoint: str | None
    """Where they ask for missed ones; None: nowhere."""

    def __init__(self, settings: KVEventsConfig, *, host: str) -> None:
        """`host` is where the engine listens."""
        self.settings = settings
        self._host = host
        self._topic = settings.topic.encode()
        self._kept: deque[tuple[bytes, bytes]] = deque(maxlen=settings.buffer_steps)
        self._next_number = 0
        self._context: zmq.Context[zmq.Socket[bytes]]
        self._socket: zmq.Socket[bytes]
        self._replay: zmq.asyncio.Socket | None = None

    async def __aenter__(self) -> "KVEventPublisher":
        """Open the sockets. Raises ConfigError when an address cannot be bound."""
        self._context = zmq.Context()
        try:
            self._open()
        except BaseException:
            self._close()
            raise
        if "max_queue_size" in self.settings.model_fields_set:
            log.info("kv-events-config: max_queue_size bounds nothing here; hwm does, and what it drops shows as a gap")
        if "buffer_steps" in self.settings.model_fields_set and self.replay_endpoint is None:
            log.info(
                "kv-events-config: buffer_steps is not used without a replay_endpoint, where batches are asked for again"
            )
        if not self.endpoint.startswith(("tcp://127.", "tcp://[::1]", "ipc:")):
            log.warning(
                "KV events at %s hold prompts' token ids and cache salts, and ZMQ asks no one who they are: let only "
                "consumers reach that port",
                self.endpoint,
            )
        log.info("KV events at %s, replay at %s", self.endpoint, self.replay_endpoint or "no endpoint")
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._close()

    def source(self) -> dict[str, object]:
        """Return the settings with the endpoints as they are now, as `/kv_event_sources` of vLLM shows them."""
        addresses = {"endpoint": self.endpoint, "replay_endpoint": self.replay_endpoint}
        own = {"publisher": "zmq"} | addresses
        return self.settings.model_dump(exclude={"use_int_block_hashes", "event_encoding"}) | own

    def publish(self, batch: bytes) -> None:
        """Send an encoded batch; never blocks. A consumer that has `hwm` batches waiting misses it."""
        number = self._next_number.to_bytes(8, "big")
        self._next_number += 1
        if self._replay is not None:
            self._kept.append((number, batch))
        self._socket.send_multipart((self._topic, number, batch), zmq.NOBLOCK)

    async def run(self) -> None:
        """Answer replay requests, one after the other, until cancelled; return at once where there is no replay socket."""
        if self._replay is None:
            return
        while True:
            frames = await self._replay.recv_multipart()
            if len(frames) != 3 or frames[1] or len(frames[2]) != 8:
                log.warning("a replay request of %d frames is ignored: it must be an 8-byte number", len(frames) - 1)
                continue
            try:
                await self._send_again(self._replay, frames[0], int.from_bytes(frames[2], "big"))
            except zmq.ZMQError as exc:
                # Without the end mark the consumer knows that it has not had everything.
                log.warning("a replay ends early, as its consumer has gone or reads too slowly: %s", exc)

    async def _send_again(self, replay: zmq.asyncio.Socket, consumer: bytes, start: int) -> None:
        messages = [
            (self._topic, number, batch) for number, batch in self._kept if int.from_bytes(number, "big") >= start
        ]
        for index, message in enumerate([*messages, (b"", END_OF_REPLAY, b"")], start=1):
            await replay.send_multipart((consumer, b"", *message), zmq.NOBLOCK)
            if index % SLICE == 0:
                await asyncio.sleep(0)

    def _open(self) -> None:
        settings = self.settings
        self._socket = self._context.socket(zmq.PUB)
        self._socket.setsockopt(zmq.SNDHWM, settings.hwm)
        self._socket.setsockopt(zmq.MAXMSGSIZE, MAX_REQUEST_BYTES)
        if binds(settings.endpoint):
            self.endpoint = bind(self._socket, "endpoint", settings.endpoint, self._host)
        else:
            self._socket.setsockopt(zmq.IPV6, int("[" in settings.endpoint))
            self._socket.connect(settings.endpoint)
            self.endpoint = settings.endpoint
        self.replay_endpoint = None
        if settings.replay_endpoint is not None:
            replay = self._context.socket(zmq.ROUTER)
            # One whole replay may wait for a consumer; more is refused, not dropped unseen.
            replay.setsockopt(zmq.SNDHWM, settings.buffer_steps + 1)
            replay.setsockopt(zmq.ROUTER_MANDATORY, 1)
            replay.setsockopt(zmq.MAXMSGSIZE, MAX_REQUEST_BYTES)
            self.replay_endpoint = bind(replay, "replay_endpoint", settings.replay_endpoint, self._host)
            self._replay = zmq.asyncio.Socket.from_socket(replay)

    def _close(self) -> None:
        if self._replay is not None:
            self._replay.close()
        self._context.destroy(linger=0)
