"""What a block looks like in Redis or Valkey: a keyed MAC, a header that says whose block it is, the block's bytes.

    MAC 32 | magic 4 | version u16 | layout bytes u16 | key bytes u16 | payload bytes u64 | layout | key | payload

Integers are little-endian. The MAC (HMAC-SHA256 under the mesh secret's key for "tier-value") covers all that follows it, so
a value that was damaged, cut, forged, or copied from under another key or layout is told apart from a good one.
"""

import struct

from pdmesh.security import MeshSecret

NAMESPACE = "pdmesh:v1:"
"""What every name in Redis or Valkey begins with."""
MAC_PURPOSE = "tier-value"
MAC_BYTES = 32
MAGIC = b"pdkv"
VERSION = 1
_HEADER = struct.Struct("<4sHHHQ")


class ValueRejected(Exception):
    """A stored value that must not be used; the message says why in one word, for a metric."""


def storage_key(layout_fingerprint: str, key: bytes) -> str:
    """Name under which a block is stored."""
    return f"{NAMESPACE}{layout_fingerprint}:{key.hex()}"


def value_bytes(layout_fingerprint: str, key: bytes, block_bytes: int) -> int:
    """Size of the value of a block of `block_bytes`."""
    return MAC_BYTES + _HEADER.size + len(layout_fingerprint.encode()) + len(key) + block_bytes


def encode(secret: MeshSecret, layout_fingerprint: str, key: bytes, payload: bytes | memoryview) -> bytes:
    """Build the value of a block."""
    layout = layout_fingerprint.encode()
    header = _HEADER.pack(MAGIC, VERSION, len(layout), len(key), len(payload))
    body = b"".join((header, layout, key, payload))
    return secret.mac(MAC_PURPOSE, body) + body


def decode(secret: MeshSecret, layout_fingerprint: str, key: bytes, value: bytes) -> memoryview:
    """Return the block's bytes. Raises ValueRejected: short, mac, version, layout, key or length."""
    if len(value) < MAC_BYTES + _HEADER.size:
        raise ValueRejected("short")
    if not secret.check(MAC_PURPOSE, value[MAC_BYTES:], value[:MAC_BYTES]):
        raise ValueRejected("mac")
    magic, version, layout_bytes, key_bytes, payload_bytes = _HEADER.unpack_from(value, MAC_BYTES)
    if magic != MAGIC or version != VERSION:
        raise ValueRejected("version")
    layout_at = MAC_BYTES + _HEADER.size
    key_at = layout_at + layout_bytes
    payload_at = key_at + key_bytes
    if value[layout_at:key_at] != layout_fingerprint.encode():
        raise ValueRejected("layout")
    if value[key_at:payload_at] != key:
        raise ValueRejected("key")
    if len(value) - payload_at != payload_bytes:
        raise ValueRejected("length")
    return memoryview(value)[payload_at:]
