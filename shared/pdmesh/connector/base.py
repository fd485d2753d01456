"""The connector interface: how blocks get from one pool into another, seen from the process that wants them.

Everything that moves KV in pdmesh is a *pull*: a consumer copies blocks out of a pool that it may only read, then reads
the generation words kept beside those blocks over the same transport, and compares. What arrives is summed block by block and
compared with the sums that the owner told, so that damage on the way, or in the owner's memory, is found too. Prefill ->
decode, engine -> tier and tier -> engine are the same operation on different pools. The owner does nothing during a pull but
keep its memory alive.

Two small classes, one per process: the worker's half (register, connect, start, poll, cancel, publish) sits where the pool is
written; the scheduler's half says what is being loaded, what was offered and what ended, and moves nothing. All connectors
share the one that is in `ledger.py`.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from pdmesh.connector.pool import KVPool
from pdmesh.connector.staging import Lane
from pdmesh.protocol.layout import Layout

OwnerT = TypeVar("OwnerT")
LoadT = TypeVar("LoadT")


@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """A connector, and what it needs to reach a pool."""

    connector: str
    metadata: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerPool:
    """A pool that this process may read."""

    peer_id: str
    """`engine_id@epoch` of its owner."""
    metadata: bytes
    """What the owner's half returned from `metadata()`."""
    num_blocks: int
    block_bytes: int
    layouts: tuple[Layout, ...] = ()
    """Of its blocks, one per KV group, where they are not those of the pool here: then they are pulled to be converted."""
    others: tuple[Way, ...] = ()
    """Other connectors that may reach it, in order of preference: for who has several."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pull:
    """One transfer's work, all blocks of one group."""

    transfer_id: str
    peer_id: str
    source_block_ids: list[int]
    generations: list[int]
    """Expected generation word of each source block."""
    target_block_ids: list[int]
    deadline_s: float
    """Seconds from `start` after which the pull is given up."""
    checksums: list[int] = field(default_factory=list)
    """Expected sum of each source block; 0, or an empty list: not checked."""
    offer_id: str = ""
    """The offer that the blocks were promised with; empty: none."""
    connector: str = ""
    """Over which, for who has several; empty: the one that the peer was connected over last."""
    lane: Lane | None = None
    """Not None: the blocks go into this lane of the pool's staging area, and have the lane's size."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Publication:
    """Blocks of the own pool that consumers were promised."""

    offer_id: str
    block_ids: list[int]
    generations: list[int]
    """Generation word of each."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Published:
    """How a publication went."""

    offer_id: str
    error: str
    """Empty: consumers can pull it."""
    num_remade: int = 0
    """Times since the last one that what copies are kept in was gone, and was made anew."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Push:
    """One write of blocks of the own pool, of one group or several, into blocks of a connected peer's."""

    transfer_id: str
    """Of this write; a push of a prompt is many."""
    peer_id: str
    source_block_ids: list[int]
    target_block_ids: list[int]
    deadline_s: float
    """Seconds from its start after which it is given up."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PullResult:
    """How a pull, or a write of a push, ended."""

    transfer_id: str
    reason: str
    """Empty: every block arrived and every generation matched. Else stale, corrupt, timeout, peer_lost, cancelled,
    or error:<text>; then the target blocks hold garbage and must not be read."""
    num_bytes: int
    duration_s: float
    may_write: bool = False
    """Of a write: bytes of it may be on their way, so that only who owns the target blocks can make sure of them."""
    damaged: tuple[str, ...] = ()
    """Of a pull that went over several connectors: those over which its bytes came otherwise than they were summed."""


class SchedulerConnector(ABC, Generic[OwnerT, LoadT]):
    """The half that the scheduler asks. Keeps references to blocks for those who cannot; does no I/O and never blocks.

    A load is a pull that has begun; its owner is who waits for it. Blocks are lists of ids, one list per KV group.
    """

    @property
    @abstractmethod
    def num_loads(self) -> int:
        """Loads that have begun and not ended."""

    @property
    @abstractmethod
    def num_owners(self) -> int:
        """Loads that someone still waits for."""

    @property
    @abstractmethod
    def num_offers(self) -> int:
        """Offers whose blocks are held."""

    @abstractmethod
    def begin_load(self, load: LoadT) -> None:
        """Note a load before its pull is ordered."""

    @abstractmethod
    def find_load(self, owner: OwnerT) -> LoadT | None:
        """Return the load that `owner` waits for; None when it waits for none."""

    @abstractmethod
    def end_load(self, transfer_id: str, *, arrived: bool) -> LoadT | None:
        """Strike off a load that nothing writes for any more; None when it is not known. What it kept for an owner that went is
        the caller's to let go."""

    @abstractmethod
    def hold_offer(self, offer_id: str, blocks: list[list[int]]) -> None:
        """Take over the caller's references to an offer's blocks."""

    @abstractmethod
    def release_offer(self, offer_id: str) -> list[list[int]] | None:
        """Hand the references back; None when the offer is not held."""

    @abstractmethod
    def holders(self) -> list[list[list[int]]]:
        """Return every block list that is kept referenced here."""


class WorkerConnector(ABC):
    """The half that touches memory. Called from the loop of the process that owns the target pool; not thread-safe, but that
    `connect`, which blocks, may run in threads beside the other calls: several peers' at once, one peer's one at a time."""

    name: str

    @abstractmethod
    def register(self, pool: KVPool) -> bytes:
        """Make `pool` the target of pulls and readable by peers; return the metadata that consumers of it need."""

    @abstractmethod
    def watch_metadata(self, on_changed: Callable[[bytes], None]) -> None:
        """Call `on_changed`, from some thread, with metadata that replaces what `register` returned, each time it changes.
        Peers that connect later need the new one."""

    @abstractmethod
    def watch_published(self, on_published: Callable[[Published], None]) -> None:
        """Call `on_published`, from some thread, once for each publication, whatever becomes of it."""

    @abstractmethod
    def publish(self, publication: Publication) -> None:
        """Make blocks that are held for an offer available to consumers; never blocks. They may be let go after `retract`, and
        then whatever was not made available by then is not any more."""

    @abstractmethod
    def retract(self, offer_id: str) -> None:
        """Take a publication back, whether it is complete or not; never blocks. Unknown ones are ignored."""

    @abstractmethod
    def connect(self, peer: PeerPool) -> None:
        """Prepare to pull from `peer`. Blocks at most 5 s. Raises HandshakeRefused when memory cannot be reached."""

    @abstractmethod
    def disconnect(self, peer_id: str) -> None:
        """Forget a peer; its pulls end with `peer_lost`. Unknown peers are ignored."""

    @abstractmethod
    def start(self, pull: Pull) -> None:
        """Begin to copy; never blocks. The outcome comes from `poll`, exactly once per pull, whatever happens."""

    def start_at_rest(self, pull: Pull) -> None:
        """As `start`, for a loop that would only wait for it: a short copy may be made before this returns."""
        self.start(pull)

    @abstractmethod
    def poll(self) -> list[PullResult]:
        """Return the pulls that ended since the last call; never blocks."""

    @abstractmethod
    def cancel(self, transfer_id: str) -> None:
        """Stop a pull; it still ends through `poll`, and only when nothing writes to its target blocks any more."""

    @abstractmethod
    def fileno(self) -> int:
        """A descriptor that becomes readable when `poll` has something to return (for the core's poller)."""

    @abstractmethod
    def close(self) -> None:
        """End all pulls, release memory, end helper processes."""


class FixedMetadata(WorkerConnector):
    """Of connectors whose metadata is what `register` returned until they are closed."""

    def watch_metadata(self, on_changed: Callable[[bytes], None]) -> None:
        """It never changes."""


class ReadInPlace(WorkerConnector):
    """Of connectors whose consumers read the pool itself: an offer's blocks are available from the moment they are held."""

    def watch_published(self, on_published: Callable[[Published], None]) -> None:
        """Nothing is published."""

    def publish(self, publication: Publication) -> None:
        """Nothing is to be done."""

    def retract(self, offer_id: str) -> None:
        """Nothing was done."""


class PushConnector(WorkerConnector):
    """A worker's half that can also write into the pools of peers, and shut out who writes into its own.

    `shm` is none: a consumer on the same host pulls with the one copy that a push would take.
    """

    @abstractmethod
    def push(self, push: Push) -> None:
        """Begin to write; never blocks. The outcome comes from `poll`, as a pull's does: without a reason when all the bytes are
        in the peer's memory, and in any case only when nothing is read from the source blocks any more. `cancel` stops
        it."""

    @abstractmethod
    def shut_out(self, on_done: Callable[[], None]) -> None:
        """End all that peers write into the pool, whatever they do or fail to do, and call `on_done`, from some thread, when
        no write that was begun before this call can reach it any more. Pulls under way fail with it, and the metadata
        changes. Never blocks."""
