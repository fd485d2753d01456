"""The core's end of the two ZMQ sockets between an engine's server process and its core process."""

import contextlib
import math
from collections.abc import Iterable, Iterator

import zmq

from pdmesh.engine.incoming import Incoming
from pdmesh.engine.messages import FromCore, ToCore, encode, to_core_decoder

# How long a last word may take to leave when the server does not read.
LINGER_MS = 2000


class Mailbox:
    """The two ZMQ sockets to the server process; sending waits when the server has stopped to read."""

    def __init__(self, inbox: "zmq.Socket[bytes]", outbox: "zmq.Socket[bytes]") -> None:
        self._inbox = inbox
        self._outbox = outbox
        self._incoming = Incoming(to_core_decoder, "server")
        self._poller = zmq.Poller()
        self._descriptors: list[int] | None = None
        """Those that the poller looks at beside the inbox."""

    @property
    def num_dropped(self) -> int:
        return self._incoming.num_dropped

    def drain(self) -> Iterable[ToCore]:
        messages: list[ToCore] = []
        with contextlib.suppress(zmq.Again):
            while True:
                message = self._incoming.decode(self._inbox.recv(zmq.NOBLOCK))
                if message is not None:
                    messages.append(message)
        return messages

    def wait(self, descriptors: list[int], timeout_s: float | None = None) -> bool:
        if descriptors != self._descriptors:
            self._descriptors = descriptors
            self._poller = zmq.Poller()
            for each in (self._inbox, *descriptors):
                self._poller.register(each, zmq.POLLIN)
        return bool(self._poller.poll(None if timeout_s is None else math.ceil(timeout_s * 1000)))

    def send(self, message: FromCore) -> None:
        self._outbox.send(encode(message))


@contextlib.contextmanager
def open_mailbox(inbox_address: str, outbox_address: str) -> Iterator[Mailbox]:
    """Connect to the server's two sockets."""
    with zmq.Context() as context, context.socket(zmq.PULL) as inbox, context.socket(zmq.PUSH) as outbox:
        # The server's messages are bounded by the requests that it admits; dropping or blocking would be worse.
        inbox.set_hwm(0)
        outbox.setsockopt(zmq.LINGER, LINGER_MS)
        inbox.connect(inbox_address)
        outbox.connect(outbox_address)
        yield Mailbox(inbox, outbox)
