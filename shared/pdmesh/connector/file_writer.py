"""The owner's side of connector `file`: writes the blocks of offers into its directory, and takes them away again.

One thread does all of it, so that no call of the engine's loop waits for a file system; what cannot be written is told, not
raised. A file appears under its name when it is complete. All of an owner's files are in a directory of its own, which goes
with it; should somebody remove it before, it is made anew, and the offers that are still wanted are written again.
"""

import contextlib
import logging
import os
import queue
import threading
from collections.abc import Callable
from pathlib import Path

import msgspec

from pdmesh.connector.base import Publication, Published
from pdmesh.connector.file_directory import OwnerDirectory, sweep
from pdmesh.connector.file_format import DRAFT_SUFFIX, Contents, Seals, file_name
from pdmesh.connector.pool import KVPool
from pdmesh.security import MeshSecret

log = logging.getLogger(__name__)

# A file system that hangs must not keep the engine from ending.
CLOSE_TIMEOUT_S = 5.0
REMADE = "remade"


class FileWriter:
    """Keeps the files of one owner, named `peer_id`, under `path`. Its methods never block, but for the first and the last."""

    def __init__(self, path: Path, pool: KVPool, peer_id: str, secret: MeshSecret) -> None:
        """Make the owner's directory. Raises OSError when that cannot be."""
        self._own = OwnerDirectory(path / peer_id)
        self.proof = self._own.proof
        self.directory = self._own.path
        self._pool = pool
        self._peer_id = peer_id
        self._seals = Seals(secret, peer_id)
        self._on_published: Callable[[Published], None] = lambda published: None
        self._failures: set[str] = set()
        """Kinds of failures that have been logged."""
        self._lock = threading.Lock()
        self._wanted: dict[str, Publication] = {}
        """Publications that have not been retracted."""
        self._written: set[str] = set()
        """Of the thread alone: offers that have a file."""
        self._orders: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        """Ids of offers to look at."""
        self._again: set[str] = set()
        """Of the thread alone: offers to be written again, of which it has been told that they can be read."""
        self._num_remade = 0
        """Of the thread alone: times that the directory was made anew, until that is told."""
        self._thread = threading.Thread(target=self._work, name="file-write", daemon=True)
        self._thread.start()

    def watch(self, on_published: Callable[[Published], None]) -> None:
        """Tell, from the thread, how each publication went."""
        self._on_published = on_published

    def publish(self, publication: Publication) -> None:
        with self._lock:
            self._wanted[publication.offer_id] = publication
        self._orders.put(publication.offer_id)

    def retract(self, offer_id: str) -> None:
        with self._lock:
            known = self._wanted.pop(offer_id, None)
        if known is not None:
            self._orders.put(offer_id)

    def close(self) -> None:
        """Take everything away."""
        with self._lock:
            self._wanted.clear()
        self._orders.put(None)
        self._thread.join(CLOSE_TIMEOUT_S)
        if self._thread.is_alive():
            log.warning("%s does not answer: what lies there goes when this engine starts again", self.directory)

    def _work(self) -> None:
        with contextlib.suppress(OSError):
            sweep(self.directory)
        while (offer_id := self._orders.get()) is not None:
            publication = self._current(offer_id)
            if publication is not None and offer_id not in self._written:
                self._publish(publication)
            elif publication is None and offer_id in self._written:
                self._written.discard(offer_id)
                self._take_away(offer_id)
            else:
                self._again.discard(offer_id)
        self._own.remove()

    def _current(self, offer_id: str) -> Publication | None:
        with self._lock:
            return self._wanted.get(offer_id)

    def _publish(self, publication: Publication) -> None:
        offer_id, error = publication.offer_id, ""
        name = file_name(offer_id)
        try:
            self._restore()
            if self._write(publication, self.directory / (name + DRAFT_SUFFIX)):
                os.rename(self.directory / (name + DRAFT_SUFFIX), self.directory / name)
                self._written.add(offer_id)
            else:
                error = "it was taken back"
        except OSError as exc:
            error = exc.strerror or type(exc).__name__
            if error not in self._failures:
                self._failures.add(error)
                log.warning(
                    "offers cannot be written to %s, so consumers fetch them otherwise: %s", self.directory, error
                )
        except Exception as exc:  # the thread's top: it is told of, and the next one written
            log.exception("offer %s cannot be written", offer_id)
            error = f"{type(exc).__name__}: {exc}"
        if error:
            self._remove(name + DRAFT_SUFFIX)
        if error or offer_id not in self._again:
            num_remade, self._num_remade = self._num_remade, 0
            self._on_published(Published(offer_id=offer_id, error=error, num_remade=num_remade))
        self._again.discard(offer_id)

    def _restore(self) -> None:
        """Make the directory anew if it is gone, and have what was in it written again. Raises OSError."""
        if not self._own.restore():
            return
        self._num_remade += 1
        if REMADE not in self._failures:
            self._failures.add(REMADE)
            log.warning("%s had been removed and is made anew: nothing but this engine may remove it", self.directory)
        for offer_id in self._written:
            self._orders.put(offer_id)
        self._again |= self._written
        self._written.clear()

    def _take_away(self, offer_id: str) -> None:
        if not self._remove(file_name(offer_id)):
            # Whoever reads the other offers should not have to wait for the next one.
            with contextlib.suppress(OSError):
                self._restore()

    def _write(self, publication: Publication, path: Path) -> bool:
        """Write a file; False when the blocks are not the offer's any more."""
        pool, offer_id = self._pool, publication.offer_id
        block_bytes, macs = pool.shape.block_bytes, []
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            for place, (block_id, generation) in enumerate(
                zip(publication.block_ids, publication.generations, strict=True)
            ):
                data = memoryview(pool.blocks[block_id])
                macs.append(self._seals.of_block(offer_id, block_id, generation, data))
                write_exactly(fd, data, place * block_bytes)
                if self._current(offer_id) is not publication:
                    return False
            contents = msgspec.msgpack.encode(
                Contents(
                    peer_id=self._peer_id,
                    offer_id=offer_id,
                    block_bytes=block_bytes,
                    block_ids=publication.block_ids,
                    generations=publication.generations,
                    macs=macs,
                )
            )
            end = contents + self._seals.trailer(contents)
            write_exactly(fd, memoryview(end), len(macs) * block_bytes)
        finally:
            # Some file systems only say now that the disk is full.
            os.close(fd)
        # A block that was given away while it was copied has another word by now.
        return pool.generations_of(publication.block_ids) == publication.generations

    def _remove(self, name: str) -> bool:
        """Remove a file; False when there is none."""
        try:
            os.unlink(self.directory / name)
        except FileNotFoundError:
            return False
        except OSError as exc:
            log.warning("%s cannot be removed: %s", self.directory / name, exc.strerror)
        return True


def write_exactly(fd: int, data: memoryview, offset: int) -> None:
    """Write all of it."""
    done = 0
    while done < len(data):
        done += os.pwrite(fd, data[done:], offset + done)
