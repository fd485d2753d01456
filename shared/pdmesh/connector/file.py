"""Connector `file`: offers travel as files on a file system that owner and consumer share, where nothing else joins them.

The owner writes an offer's blocks when it is sealed, a consumer reads them, and the end of the offer removes them. Consumers
learn from the owner's server when a file is complete, and of one that could not be written: they fetch otherwise then.
"""

import hmac
import logging
import os
import queue
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from pdmesh.connector.active import ActivePulls, PullEnd, error_reason, fault_of
from pdmesh.connector.base import FixedMetadata, PeerPool, Publication, Published, Pull, PullResult
from pdmesh.connector.file_directory import PROOF_BYTES
from pdmesh.connector.file_format import OWNER_FILE, Seals, is_directory_name
from pdmesh.connector.file_reader import FilePull, FileReader
from pdmesh.connector.file_writer import FileWriter
from pdmesh.connector.options import FileOptions
from pdmesh.connector.pool import KVPool, PoolShape, PullTarget
from pdmesh.connector.shm import check_block_bytes
from pdmesh.connector.signed_metadata import PoolMetadata, opened, signed
from pdmesh.connector.throttle import Throttle
from pdmesh.errors import ConfigError, HandshakeRefused
from pdmesh.security import MeshSecret

log = logging.getLogger(__name__)

CONNECT_TIMEOUT_S = 4.0


class FileMetadata(PoolMetadata, frozen=True, kw_only=True):
    """What a consumer needs to know a directory."""

    proof: bytes
    """Empty: the owner cannot write."""
    error: str = ""
    """Why not."""


class FileConnector(FixedMetadata):
    """Both ends: writes the registered pool's offers, reads those of peers."""

    name = "file"

    def __init__(self, peer_id: str, secret: MeshSecret, options: FileOptions) -> None:
        self._path = Path(options.path)
        if not options.path:
            raise ConfigError(
                'connector file: connector-options must name its directory, as {"file": {"path": "/mnt/kv"}}'
            )
        if not self._path.is_dir():
            raise ConfigError(f"connector-options: file.path {options.path} is not a directory")
        if not secret.is_secret:
            raise ConfigError("connector file needs the mesh secret: without it nobody can tell who wrote a file")
        self._peer_id = peer_id
        self._secret = secret
        self._pool: KVPool | None = None
        self._writer: FileWriter | None = None
        self._on_published: Callable[[Published], None] = lambda published: None
        self._error = ""
        self._peers: dict[str, tuple[PoolShape, Seals]] = {}
        self._pulls = ActivePulls()
        self._running: dict[str, FilePull] = {}
        self._proofs: dict[str, FilePull] = {}
        """Pulls from the own pool, by the offer that is made for each."""
        self._reader = FileReader(options.num_threads, Throttle(options.throttle_bytes_s))

    def register(self, pool: KVPool) -> bytes:
        self._pool = pool
        try:
            self._writer = FileWriter(self._path, pool, self._peer_id, self._secret)
            self._writer.watch(self._published)
        except OSError as exc:
            self._error = f"{self._path} cannot be written to: {exc.strerror}"
            log.warning("connector file offers nothing: %s", self._error)
        metadata = FileMetadata(
            peer_id=self._peer_id,
            num_blocks=pool.shape.num_blocks,
            block_bytes=pool.shape.block_bytes,
            proof=b"" if self._writer is None else self._writer.proof,
            error=self._error,
        )
        return signed(metadata, self._secret, self.name)

    def watch_published(self, on_published: Callable[[Published], None]) -> None:
        self._on_published = on_published

    def publish(self, publication: Publication) -> None:
        if self._writer is None:
            self._on_published(Published(offer_id=publication.offer_id, error=self._error))
        else:
            self._writer.publish(publication)

    def retract(self, offer_id: str) -> None:
        if self._writer is not None:
            self._writer.retract(offer_id)

    def connect(self, peer: PeerPool) -> None:
        pool = self._registered()
        metadata = self._checked(peer)
        shape = metadata.shape_of(peer)
        check_block_bytes(peer, pool.shape)
        _within(CONNECT_TIMEOUT_S, lambda: self._check_directory(metadata))
        self._peers[peer.peer_id] = (shape, Seals(self._secret, peer.peer_id))

    def disconnect(self, peer_id: str) -> None:
        if self._peers.pop(peer_id, None) is not None:
            for active in self._pulls.of_peer(peer_id):
                self._end(active.pull.transfer_id, PullEnd.PEER_LOST)

    def start(self, pull: Pull) -> None:
        self._pulls.add(pull)
        pool = self._registered()
        peer = self._peers.get(pull.peer_id)
        if peer is None:
            self._pulls.finish(pull.transfer_id, PullEnd.PEER_LOST)
        elif fault := fault_of(pull, peer[0], (target := pool.target(pull.lane)).shape):
            self._pulls.finish(pull.transfer_id, fault)
        elif not pull.source_block_ids:
            self._pulls.finish(pull.transfer_id, "")
        else:
            self._begin(pull, target, peer[1])

    def poll(self) -> list[PullResult]:
        results = self._pulls.take()
        for result in results:
            running = self._running.pop(result.transfer_id, None)
            if running is not None and self._proofs.pop(running.pull.offer_id, None) is not None:
                self.retract(running.pull.offer_id)
        return results

    def cancel(self, transfer_id: str) -> None:
        self._end(transfer_id, PullEnd.CANCELLED)

    def fileno(self) -> int:
        return self._pulls.fileno()

    def close(self) -> None:
        for transfer_id in list(self._running):
            self._end(transfer_id, PullEnd.CANCELLED)
        self._reader.close()
        if self._writer is not None:
            self._writer.close()
            self._writer = None
        self._pulls.close()

    def _end(self, transfer_id: str, reason: str) -> None:
        if (running := self._running.get(transfer_id)) is not None:
            running.end(reason)

    def _begin(self, pull: Pull, target: PullTarget, seals: Seals) -> None:
        if pull.offer_id:
            running = self._running[pull.transfer_id] = FilePull(pull, self._pulls, target)
            self._reader.read(running, self._path / pull.peer_id, seals)
        elif pull.peer_id == self._peer_id and self._writer is not None:
            self._running[pull.transfer_id] = self._prove(pull, self._writer, target)
        else:
            self._pulls.finish(pull.transfer_id, error_reason("only the blocks of offers are written to files"))

    def _prove(self, pull: Pull, writer: FileWriter, target: PullTarget) -> FilePull:
        """Pull from the own pool: what is to be read has to be written first."""
        offer_id = f"own/{pull.transfer_id}"
        running = self._proofs[offer_id] = FilePull(replace(pull, offer_id=offer_id), self._pulls, target)
        writer.publish(Publication(offer_id=offer_id, block_ids=pull.source_block_ids, generations=pull.generations))
        return running

    def _published(self, published: Published) -> None:
        """Tell of a publication; in the writer's thread."""
        proof = self._proofs.get(published.offer_id)
        if proof is None:
            self._on_published(published)
        elif published.error:
            proof.end(error_reason(published.error))
        else:
            self._reader.read(proof, self._path / self._peer_id, Seals(self._secret, self._peer_id))

    def _registered(self) -> KVPool:
        if self._pool is None:
            raise RuntimeError("register a pool before anything is pulled")
        return self._pool

    def _checked(self, peer: PeerPool) -> FileMetadata:
        metadata = opened(peer, FileMetadata, self._secret, self.name)
        if not is_directory_name(peer.peer_id):
            raise HandshakeRefused(f"the file metadata is of {metadata.peer_id}, not of {peer.peer_id}")
        if not metadata.proof:
            raise HandshakeRefused(f"{peer.peer_id} writes no files: {metadata.error}")
        return metadata

    def _check_directory(self, metadata: FileMetadata) -> None:
        """Raise HandshakeRefused when what is mounted here is not what the owner writes to."""
        path = self._path / metadata.peer_id / OWNER_FILE
        try:
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as exc:
            raise HandshakeRefused(f"{path} cannot be read: {exc.strerror}") from exc
        try:
            proof = os.pread(fd, PROOF_BYTES, 0)
        finally:
            os.close(fd)
        if not hmac.compare_digest(proof, metadata.proof):
            raise HandshakeRefused(f"{path} is not what {metadata.peer_id} has written")


def _within(seconds: float, check: Callable[[], None]) -> None:
    """Do what may hang with a file system. Raises what it raises, or HandshakeRefused when the time is over."""
    answers: queue.SimpleQueue[Exception | None] = queue.SimpleQueue()

    def answer() -> None:
        try:
            check()
        except Exception as exc:  # handed over
            answers.put(exc)
        else:
            answers.put(None)

    threading.Thread(target=answer, name="file-connect", daemon=True).start()
    try:
        error = answers.get(timeout=seconds)
    except queue.Empty:
        raise HandshakeRefused(f"the file system did not answer within {seconds:.0f} s") from None
    if error is not None:
        raise error
