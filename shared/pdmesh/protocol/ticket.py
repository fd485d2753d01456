"""The ticket: how a prefill tells a decode, through the proxy, which KV to fetch and for what request it was computed.

A ticket is one version byte, a MAC under the mesh secret, and a msgpack body. It is opaque to the proxy, never shown to
clients and never taken from them. It carries a digest of everything that decided the KV, so that a decode whose own view of
the request differs refuses to use it.
"""

import hashlib

import msgspec
import numpy as np
from numpy.typing import NDArray

from pdmesh.errors import Forbidden, TransferFailed
from pdmesh.protocol.capabilities import OWN
from pdmesh.protocol.messages import GroupBlocks
from pdmesh.security import MeshSecret

TICKET_VERSION = OWN.ticket_write.newest
"""In which tickets are written here."""
MAC_PURPOSE = "ticket"
MAC_BYTES = 32


class Ticket(msgspec.Struct, frozen=True, kw_only=True):
    """One offer, seen from whoever may fetch it."""

    version: int = TICKET_VERSION
    offer_id: str
    engine_id: str
    epoch: int
    """New for each start of the engine: a restarted one honours nothing of the old."""
    address: str
    """gRPC `host:port` of the owner's server process."""
    digest: bytes
    """`request_digest` of the request the KV belongs to."""
    groups: list[GroupBlocks]
    num_tokens: int
    """Tokens from position 0 whose KV the blocks hold."""
    layout_fingerprints: list[str]
    """One per KV group."""
    model_fingerprint: str
    first_tokens: dict[int, list[int]]
    """Tokens emitted when the prefill ended, by choice: the consumer goes on after these or not at all."""

    @property
    def peer_id(self) -> str:
        """`engine_id@epoch` of the owner."""
        return f"{self.engine_id}@{self.epoch}"


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(Ticket).decode


def seal(ticket: Ticket, secret: MeshSecret) -> bytes:
    """Serialise and sign."""
    head = bytes([ticket.version])
    body = _encode(ticket)
    return head + secret.mac(MAC_PURPOSE, head + body) + body


def unseal(data: bytes, secret: MeshSecret) -> Ticket:
    """Check and read a ticket.

    Raises TransferFailed when its version is unknown (a peer of another release sealed it; the prompt can be recomputed) or
    when it names blocks that no pool can have, and Forbidden when it was not sealed with this mesh's secret or has been changed.
    """
    head, mac, body = data[:1], data[1 : 1 + MAC_BYTES], data[1 + MAC_BYTES :]
    if head and not OWN.ticket_read.oldest <= head[0] <= OWN.ticket_read.newest:
        raise TransferFailed(f"version: the ticket has version {head[0]}, this service reads {OWN.ticket_read}")
    if not body or not secret.check(MAC_PURPOSE, head + body, mac):
        raise Forbidden("the ticket is not one of this mesh or has been changed")
    try:
        ticket = _decode(body)
    except msgspec.MsgspecError as exc:
        raise TransferFailed(f"version: the ticket cannot be read: {exc}") from exc
    if not all(group.is_sound for group in ticket.groups):
        raise TransferFailed("groups: the ticket names blocks that no pool can have")
    return ticket


def request_digest(
    token_ids: "list[int] | NDArray[np.int64]", *, cache_salt: str, lora: str = "", template: str = ""
) -> bytes:
    """Return 32 bytes naming all that decides a prompt's KV: token ids, salt, LoRA adapter, template revision.

    SHA-256 over fields that each carry a tag and a length, so that no two requests share an encoding.
    """
    digest = hashlib.sha256(b"pdmesh-request-v1")
    fields = (
        (b"tokens", np.asarray(token_ids, dtype="<i8").tobytes()),
        (b"salt", cache_salt.encode()),
        (b"lora", lora.encode()),
        (b"template", template.encode()),
    )
    for tag, value in fields:
        digest.update(tag + b"\0" + len(value).to_bytes(8, "little"))
        digest.update(value)
    return digest.digest()
