"""Pulls whose blocks are converted on their way: piece by piece into lanes of the staging area, and from there into the pool.

The core's loop gives lanes to pieces and hears of their ends; a thread of its own converts, so that no step waits for it:
the blocks that it writes belong to a sequence that waits for all of them. Each connector checks a piece's generations after its
data, as for any pull. A transfer ends once, when nothing reads or writes on its behalf any more.
"""

import logging
import os
import queue
import threading
import time
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum, auto

from pdmesh.connector.active import PullEnd, error_reason
from pdmesh.connector.base import Pull, PullResult
from pdmesh.connector.pool import KVPool
from pdmesh.connector.staging import NUM_LANES, Lane, StagingArea
from pdmesh.engine.conversion import ConvertingPull, Piece, pieces_of
from pdmesh.engine.journeys import EndedPull
from pdmesh.errors import MeshError
from pdmesh.models.kv_convert import convert

log = logging.getLogger(__name__)

# One piece is converted while the next is on its way.
MAX_PIECES_PER_PULL = 2
# A peer that does not answer leaves a lane to the others.
MAX_PIECES_PER_PEER = NUM_LANES - 1
CLOSE_GRACE_S = 5.0
# A loop that is busy is not woken more often.
LEAST_PATIENCE_S = 0.02
UNCONVERTIBLE = "unconvertible"
"""Reason of a pull whose numbers are too large for the dtype here."""


@dataclass(slots=True, eq=False)
class _Transfer:
    """A converting pull that has not ended."""

    pull: ConvertingPull
    pieces: deque[Piece]
    started_s: float
    open: dict[str, Lane] = field(default_factory=dict)
    """Pieces under way, by the id of their pull, until they are converted."""
    num_begun: int = 0
    num_bytes: int = 0
    connector: str = ""
    reason: str = ""
    """Why it ends without success."""
    damaged: set[str] = field(default_factory=set)
    """See `PullResult`; of all pieces."""

    @property
    def deadline_s(self) -> float:
        return self.started_s + self.pull.deadline_s

    @property
    def has_ended(self) -> bool:
        return not self.open and (bool(self.reason) or not self.pieces)


class _Order(Enum):
    """What the thread finds beside conversions."""

    LOOK_AGAIN = auto()
    """Something else is overdue first."""
    STOP = auto()


@dataclass(frozen=True, slots=True)
class _Conversion:
    """A piece whose blocks lie in its lane."""

    piece_id: str
    piece: Piece
    lane: Lane


class StagedPulls:
    """The converting pulls of one core. `start` and `cancel` are those of plain pulls; not thread-safe but for the thread."""

    def __init__(self, pool: KVPool, start: Callable[[Pull], None], cancel: Callable[[str], None]) -> None:
        assert pool.staging is not None, "conversion needs a staging area"
        self._pool = pool
        self._staging: StagingArea = pool.staging
        self._start, self._cancel = start, cancel
        self._transfers: dict[str, _Transfer] = {}
        self._by_piece: dict[str, tuple[_Transfer, Piece]] = {}
        self._lanes = list(range(NUM_LANES))
        """Free ones."""
        self._ended: list[EndedPull] = []
        self._tasks: queue.SimpleQueue[_Conversion | _Order] = queue.SimpleQueue()
        self._done: queue.SimpleQueue[tuple[str, str]] = queue.SimpleQueue()
        """Ids of pieces' pulls, and why they could not be converted: empty when they were."""
        self._wake_fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._overdue_s: float | None = None
        """When the first transfer that has no piece under way has waited too long."""
        self._thread = threading.Thread(target=self._work, name="kv-convert", daemon=True)
        self._thread.start()

    def __len__(self) -> int:
        return len(self._transfers)

    @property
    def num_lanes_used(self) -> int:
        return NUM_LANES - len(self._lanes)

    def fileno(self) -> int:
        """Readable when `poll` may have something to return."""
        return self._wake_fd

    def start(self, pull: ConvertingPull) -> None:
        """Begin; the outcome comes from `poll`, exactly once."""
        if pull.transfer_id in self._transfers:
            raise ValueError(f"transfer {pull.transfer_id} is under way")
        pieces = deque(
            piece
            for part in pull.parts
            for piece in pieces_of(part, lane_blocks=self._staging.num_blocks(part.source.block_bytes))
        )
        transfer = self._transfers[pull.transfer_id] = _Transfer(pull, pieces, time.monotonic())
        self._settle(transfer)
        self._advance()

    def cancel(self, transfer_id: str) -> None:
        """Stop; it still ends through `poll`. Unknown ids are ignored."""
        if (transfer := self._transfers.get(transfer_id)) is not None:
            self._fail(transfer, PullEnd.CANCELLED)
            self._advance()

    def owns(self, transfer_id: str) -> bool:
        """Whether a pull's id is that of a piece."""
        return transfer_id in self._by_piece

    def piece_ended(self, result: PullResult, connector: str) -> None:
        """Take the end of a piece's pull in."""
        transfer, piece = self._by_piece[result.transfer_id]
        transfer.connector = connector
        transfer.damaged.update(result.damaged)
        if result.reason:
            self._close(result.transfer_id, transfer)
            self._fail(transfer, result.reason)
        elif transfer.reason:
            self._close(result.transfer_id, transfer)
            self._settle(transfer)
        else:
            transfer.num_bytes += result.num_bytes
            self._tasks.put(_Conversion(result.transfer_id, piece, transfer.open[result.transfer_id]))
        self._advance()

    def poll(self) -> list[EndedPull]:
        """Return the transfers that ended since the last call; never blocks."""
        try:
            os.eventfd_read(self._wake_fd)
        except BlockingIOError:
            pass
        else:
            while not self._done.empty():
                piece_id, reason = self._done.get()
                transfer, _ = self._by_piece[piece_id]
                self._close(piece_id, transfer)
                if reason:
                    self._fail(transfer, reason)
                else:
                    self._settle(transfer)
            self._advance()
        ended, self._ended = self._ended, []
        return ended

    def close(self) -> None:
        """End the thread. Call when no connector writes any more."""
        self._tasks.put(_Order.STOP)
        self._thread.join(CLOSE_GRACE_S)
        if not self._thread.is_alive():
            os.close(self._wake_fd)

    def _advance(self) -> None:
        """Give free lanes to pieces: of the transfers with the fewest under way first, then in their order."""
        now = time.monotonic()
        for each in list(self._transfers.values()):
            if not each.open and now >= each.deadline_s:
                self._fail(each, PullEnd.TIMEOUT)
        while self._lanes and (transfer := self._next_transfer()) is not None:
            self._begin_piece(transfer)
        waiting = [each.deadline_s for each in self._transfers.values() if not each.open]
        overdue_s = min(waiting, default=None)
        if overdue_s != self._overdue_s:
            self._overdue_s = overdue_s
            self._tasks.put(_Order.LOOK_AGAIN)

    def _next_transfer(self) -> _Transfer | None:
        num_open: Counter[str] = Counter()
        for each in self._transfers.values():
            num_open[each.pull.peer_id] += len(each.open)
        waiting = [
            each
            for each in self._transfers.values()
            if each.pieces
            and not each.reason
            and len(each.open) < MAX_PIECES_PER_PULL
            and num_open[each.pull.peer_id] < MAX_PIECES_PER_PEER
        ]
        return min(waiting, key=lambda each: len(each.open), default=None)

    def _begin_piece(self, transfer: _Transfer) -> None:
        piece, pull = transfer.pieces.popleft(), transfer.pull
        part = piece.part
        source_ids = part.source_block_ids[piece.source_places]
        lane = Lane(self._lanes.pop(), part.source.block_bytes)
        piece_id = f"{pull.transfer_id}/{transfer.num_begun}"
        transfer.num_begun += 1
        transfer.open[piece_id] = lane
        self._by_piece[piece_id] = transfer, piece
        self._start(
            Pull(
                transfer_id=piece_id,
                peer_id=pull.peer_id,
                source_block_ids=source_ids,
                generations=part.generations[piece.source_places],
                checksums=part.checksums[piece.source_places],
                target_block_ids=list(range(len(source_ids))),
                deadline_s=max(0.0, transfer.deadline_s - time.monotonic()),
                offer_id=pull.offer_id,
                connector=pull.connector,
                lane=lane,
            )
        )

    def _fail(self, transfer: _Transfer, reason: str) -> None:
        """Let what runs of a transfer end; it then ends too."""
        if not transfer.reason:
            transfer.reason = reason
            transfer.pieces.clear()
            for piece_id in transfer.open:
                self._cancel(piece_id)
        elif reason == PullEnd.CORRUPT:
            # Whatever failed before: what the owner drew from such KV may be wrong.
            transfer.reason = reason
        self._settle(transfer)

    def _close(self, piece_id: str, transfer: _Transfer) -> None:
        """Nothing reads or writes a piece's lane any more."""
        del self._by_piece[piece_id]
        self._lanes.append(transfer.open.pop(piece_id).index)

    def _settle(self, transfer: _Transfer) -> None:
        pull = transfer.pull
        if not transfer.has_ended or self._transfers.pop(pull.transfer_id, None) is None:
            return
        result = PullResult(
            transfer_id=pull.transfer_id,
            reason=transfer.reason,
            num_bytes=0 if transfer.reason else transfer.num_bytes,
            duration_s=time.monotonic() - transfer.started_s,
            damaged=tuple(sorted(transfer.damaged)),
        )
        self._ended.append(EndedPull(result, transfer.connector))
        os.eventfd_write(self._wake_fd, 1)

    def _work(self) -> None:
        """Convert what comes; wake the loop for what waits too long."""
        while True:
            overdue_s = self._overdue_s
            patience_s = None if overdue_s is None else max(LEAST_PATIENCE_S, overdue_s - time.monotonic())
            try:
                task = self._tasks.get(timeout=patience_s)
            except queue.Empty:
                os.eventfd_write(self._wake_fd, 1)
                continue
            if task is _Order.STOP:
                return
            if isinstance(task, _Conversion):
                self._done.put((task.piece_id, self._convert(task)))
                os.eventfd_write(self._wake_fd, 1)

    def _convert(self, task: _Conversion) -> str:
        """Convert a piece that lies in its lane; why it could not be, or nothing."""
        piece, part = task.piece, task.piece.part
        try:
            blocks = self._staging.blocks(task.lane)[: len(part.source_block_ids[piece.source_places])]
            self._pool.blocks[piece.target_block_ids] = convert(
                blocks, part.source, part.target, tokens=piece.tokens, first_block=piece.first_source_block
            )
        except MeshError as exc:
            return f"{UNCONVERTIBLE}:{exc.message}"
        except Exception as exc:  # the thread's top: whatever happens, the transfer ends and the others go on
            log.exception("a piece of %d blocks could not be converted", len(piece.target_block_ids))
            return error_reason(exc)
        return ""
