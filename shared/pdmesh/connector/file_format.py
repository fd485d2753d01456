"""What connector `file` writes: one file for each offer, its blocks in a row, then which they are and a MAC over each.

A reader takes a block for what it is only when its MAC, under a key that both sides derive from the mesh secret, says so: what
lies on a shared file system may have been written by anyone, or half.
"""

import hashlib
import hmac
import os
import re
from collections.abc import Callable

import msgspec

from pdmesh.security import MeshSecret

MAGIC = b"pdmeshK1"
MAC_BYTES = 32
TRAILER_BYTES = MAC_BYTES + 8 + len(MAGIC)
"""MAC and length of the contents, then the magic number."""
MAX_CONTENTS_BYTES = 64 << 20
DRAFT_SUFFIX = ".part"
OWNER_FILE = "owner"
"""Holds the proof that a directory is the one its owner speaks of; locked while the owner lives."""

_PEER_ID = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9_.-]*@[A-Za-z0-9_-]+")


class Contents(msgspec.Struct, frozen=True, kw_only=True):
    """What the blocks of a file are."""

    peer_id: str
    offer_id: str
    block_bytes: int
    block_ids: list[int]
    generations: list[int]
    macs: list[bytes]


def is_directory_name(peer_id: str) -> bool:
    """Whether a peer id may be used as the name of a directory."""
    return len(peer_id) < 200 and _PEER_ID.fullmatch(peer_id) is not None


def file_name(offer_id: str) -> str:
    """Name of an offer's file in its owner's directory, whatever characters the offer's id has."""
    return hashlib.sha256(offer_id.encode()).hexdigest()[:40]


class Seals:
    """MACs of one owner's files."""

    def __init__(self, secret: MeshSecret, peer_id: str) -> None:
        self._key = secret.mac("file-blocks", peer_id.encode())

    def of_block(self, offer_id: str, block_id: int, generation: int, data: memoryview) -> bytes:
        """MAC of one block: it is this block of this offer, with this content."""
        mac = hmac.new(self._key, f"{offer_id}/{block_id}/{generation}/".encode(), "sha256")
        mac.update(data)
        return mac.digest()

    def trailer(self, contents: bytes) -> bytes:
        """What follows encoded contents at the end of a file."""
        return hmac.digest(self._key, contents, "sha256") + len(contents).to_bytes(8, "little") + MAGIC

    def check(self, contents: bytes, mac: bytes) -> bool:
        return hmac.compare_digest(hmac.digest(self._key, contents, "sha256"), mac)


def read_contents(fd: int, seals: Seals, *, peer_id: str, offer_id: str, block_bytes: int) -> Contents:
    """Read what a file holds. Raises ValueError that says what is wrong with it."""
    size = os.fstat(fd).st_size
    trailer = os.pread(fd, TRAILER_BYTES, max(0, size - TRAILER_BYTES))
    if len(trailer) != TRAILER_BYTES or not trailer.endswith(MAGIC):
        raise ValueError("it is cut short")
    length = int.from_bytes(trailer[MAC_BYTES : -len(MAGIC)], "little")
    begin = size - TRAILER_BYTES - length
    if length > MAX_CONTENTS_BYTES or begin < 0:
        raise ValueError("its contents are longer than itself")
    encoded = os.pread(fd, length, begin)
    if not seals.check(encoded, trailer[:MAC_BYTES]):
        raise ValueError("it was not written with this mesh's secret")
    contents = msgspec.msgpack.decode(encoded, type=Contents)
    if (contents.peer_id, contents.offer_id, contents.block_bytes) != (peer_id, offer_id, block_bytes):
        raise ValueError("it is another offer's")
    num = len(contents.block_ids)
    if len(contents.generations) != num or len(contents.macs) != num or num * block_bytes != begin:
        raise ValueError("its contents do not fit its length")
    return contents


def read_exactly(fd: int, buffer: memoryview, offset: int, *, goes_on: Callable[[], bool]) -> bool:
    """Fill a buffer from a file; False when it ends before, or when that is not wanted any more."""
    done = 0
    while done < len(buffer):
        count = os.preadv(fd, [buffer[done:]], offset + done) if goes_on() else 0
        if count == 0:
            return False
        done += count
    return True
