"""What arrives on a ZMQ socket between an engine's two processes, decoded; what cannot be is no reason to end either of them."""

import logging
from typing import Generic, TypeVar

import msgspec

log = logging.getLogger(__name__)

MessageT = TypeVar("MessageT")


class Incoming(Generic[MessageT]):
    """Decodes one direction's messages."""

    def __init__(self, decoder: "msgspec.msgpack.Decoder[MessageT]", sender: str) -> None:
        self._decoder = decoder
        self._sender = sender
        self.num_dropped = 0
        """Messages that could not be decoded."""

    def decode(self, data: bytes) -> MessageT | None:
        """Return the message, or None for one that cannot be decoded: it is dropped, counted, and the first one logged."""
        try:
            return self._decoder.decode(data)
        except (msgspec.MsgspecError, RecursionError) as exc:
            self.num_dropped += 1
            if self.num_dropped == 1:
                log.error("a message of %d bytes on the socket of the %s is dropped: %s", len(data), self._sender, exc)
            return None
