"""What an engine and a native helper process say to each other over their socket pair: msgpack behind a 4-byte length."""

from collections.abc import Iterator

import msgspec

LENGTH_BYTES = 4

# ---- engine -> helper ------------------------------------------------------------------------------


class Setup(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """First message: whose agent to make and what to register. The pool's descriptor is inherited."""

    transport: str
    agent_name: str
    on_loopback: bool
    num_blocks: int
    block_bytes: int
    lane_bytes: int = 0
    """Of the staging area, whose descriptor is inherited too; 0: there is none."""
    num_threads: int = 0
    """Of the agent; 0: its default."""
    host: str = ""
    """Under which other agents reach it; empty: it finds out."""
    throttle_bytes_s: int = 0
    """Most bytes per second of all pulls; 0: no limit."""


class ConnectAgent(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Answered by AgentConnected."""

    peer_id: str
    order: int = 0
    """Comes back with the answer: a helper that was started anew answers for the peers of the one before as well."""
    agent: bytes
    base: int
    header_bytes: int
    """Bytes before the first block; the generation words are at their start."""
    proof_address: int
    proof: bytes


class DisconnectAgent(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    peer_id: str


class StartPull(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Answered by PullEnded."""

    transfer_id: str
    peer_id: str
    source_block_ids: list[int]
    generations: list[int]
    target_block_ids: list[int]
    deadline_s: float
    """Seconds that are left."""
    checksums: list[int]
    """Empty: nothing is checked."""
    lane: int = -1
    """Of the staging area, to read into; -1: into the pool."""
    lane_block_bytes: int = 0
    """Of a block there."""


class StartPush(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Write own blocks into a peer's; answered by PullEnded."""

    transfer_id: str
    peer_id: str
    source_block_ids: list[int]
    target_block_ids: list[int]
    deadline_s: float
    """Seconds that are left."""


class CancelPull(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    transfer_id: str


ToHelper = Setup | ConnectAgent | DisconnectAgent | StartPull | StartPush | CancelPull

# ---- helper -> engine ------------------------------------------------------------------------------


class HelperReady(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The pool is registered; what peers need to read it."""

    agent: bytes
    base: int
    proof_address: int
    proof: bytes


class HelperFailed(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The transport cannot be used here."""

    message: str


class AgentConnected(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    peer_id: str
    order: int = 0
    error: str = ""


class PullEnded(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    transfer_id: str
    reason: str
    num_bytes: int
    may_write: bool = False
    """Of a write: bytes of it may still come to the peer's memory. Of a pull: to this one's, until the helper is dead."""


FromHelper = HelperReady | HelperFailed | AgentConnected | PullEnded

encode = msgspec.msgpack.Encoder().encode
to_helper_decoder: msgspec.msgpack.Decoder[ToHelper] = msgspec.msgpack.Decoder(ToHelper)
from_helper_decoder: msgspec.msgpack.Decoder[FromHelper] = msgspec.msgpack.Decoder(FromHelper)


def frame(message: ToHelper | FromHelper) -> bytes:
    """Encode one message for the socket."""
    body = encode(message)
    return len(body).to_bytes(LENGTH_BYTES, "little") + body


class Frames:
    """Cuts a byte stream back into message bodies."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> Iterator[bytes]:
        """Add what was received; yields every body that is complete now."""
        self._buffer += data
        while len(self._buffer) >= LENGTH_BYTES:
            end = LENGTH_BYTES + int.from_bytes(self._buffer[:LENGTH_BYTES], "little")
            if len(self._buffer) < end:
                return
            body = bytes(self._buffer[LENGTH_BYTES:end])
            del self._buffer[:end]
            yield body
