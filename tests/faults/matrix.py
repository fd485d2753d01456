"""The fault matrix as data: what is done to the mesh, at which moment of a request, and what must come of it.

Pure: nothing here starts or measures anything. What a cell must come to is written here before anybody runs it; a result that
differs is a defect of the mesh, never a reason to edit this page.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Fault(StrEnum):
    KILL = "kill -9"
    FREEZE = "SIGSTOP 5 s"
    RESTART = "restart"
    """SIGTERM, and the same service again at the same address."""
    DROP = "packets dropped"
    DELAY = "delayed 500 ms"
    CUT = "cut mid-transfer"
    EXPIRY = "read after expiry"
    CORRUPT = "corrupted block"
    DISK_FULL = "disk full"
    WRONG_MODEL = "wrong model on one side"
    CLOCK_SKEW = "clock skew 60 s"
    DISCONNECT = "client disconnect"


class Target(StrEnum):
    PROXY = "proxy"
    PREFILL = "prefill"
    """The one that has this request."""
    DECODE = "decode"
    """The one that has this request, or will have it."""
    KVCACHE = "kvcache"
    VALKEY = "Valkey"
    NONE = ""
    """The fault says by itself what it hits."""


class Column(StrEnum):
    """Moments of a request, in order."""

    BEFORE = "before admission"
    QUEUED = "queued at prefill"
    MID_PREFILL = "mid-prefill (chunk k of n)"
    OFFERED = "offered"
    MID_FETCH = "mid-fetch"
    FETCHED = "fetched, not committed"
    DECODING = "decoding"
    LAST = "last token"


class Policy(StrEnum):
    ALTERNATIVE = "alternative"
    """Two of each service that a request needs, `kv_load_failure_policy recompute`, the proxy's retries."""
    ALONE = "alone"
    """One of each, `kv_load_failure_policy fail`, no retries: what fails must say so."""


class Answer(StrEnum):
    """What the client has at the end."""

    RIGHT = "right"
    """Every token, and each of them the single engine's."""
    UNAVAILABLE = "503"
    """PeerUnavailable or Draining, by name, after no token or a right beginning."""
    TRANSFER_FAILED = "502"
    """TransferFailed, likewise."""
    BROKEN = "connection ended"
    """Its connection ended without the stream's end mark, after no token or a right beginning."""
    LEFT = "left"
    """It went away itself."""
    # None of these is ever allowed.
    WRONG = "wrong tokens"
    OTHER = "another error"
    LATE = "nothing within the deadline"


class Connector(StrEnum):
    SHM = "shm"
    NIXL = "nixl"
    PUSH = "nixl push"
    """NIXL, and prefill writes into decode's memory while it computes."""
    GRPC = "grpc"
    FILE = "file"


@dataclass(frozen=True, slots=True, order=True)
class Row:
    fault: Fault
    target: Target = Target.NONE

    @property
    def name(self) -> str:
        return (
            f"{self.fault} {self.target}".strip() if self.fault is not Fault.FREEZE else f"{self.target} {self.fault}"
        )


@dataclass(frozen=True, slots=True, order=True)
class Cell:
    row: Row
    column: Column
    policy: Policy
    connector: Connector

    @property
    def name(self) -> str:
        return f"{self.row.name} / {self.column} / {self.policy} / {self.connector}"

    @property
    def has_wires(self) -> bool:
        """Whether its engines stand in network namespaces of their own."""
        return self.row.fault in NETWORK

    @property
    def kind(self) -> str:
        """Which mesh it needs: those of one kind follow each other."""
        return f"{self.policy} {self.connector}{' wires' if self.has_wires else ''}"


SERVICES = (Target.PROXY, Target.PREFILL, Target.DECODE, Target.KVCACHE, Target.VALKEY)
ROWS = (
    *(Row(fault, target) for fault in (Fault.KILL, Fault.FREEZE, Fault.RESTART) for target in SERVICES),
    *(Row(fault) for fault in Fault if fault not in (Fault.KILL, Fault.FREEZE, Fault.RESTART)),
)
COLUMNS = tuple(Column)
NETWORK = (Fault.DROP, Fault.DELAY, Fault.CUT)

UNTIL_OFFERED = (Column.BEFORE, Column.QUEUED, Column.MID_PREFILL)
PUSHED_BY = (Target.PROXY, Target.PREFILL, Target.DECODE)
"""Whoever has a part in a push."""
PUSHED_AT = (Column.MID_PREFILL, Column.OFFERED)
FETCHING = (Column.OFFERED, Column.MID_FETCH, Column.FETCHED)
GENERATING = (Column.DECODING, Column.LAST)

RIGHT = frozenset({Answer.RIGHT})
"""Right tokens and nothing else."""
OR_UNAVAILABLE = RIGHT | {Answer.UNAVAILABLE}
OR_TRANSFER_FAILED = RIGHT | {Answer.TRANSFER_FAILED}
OR_BROKEN = RIGHT | {Answer.BROKEN}
LEFT = frozenset({Answer.LEFT})

# What a mesh of one engine each, told to fail rather than compute anew, may say instead of the right tokens. What is not here
# must be right: a service that is not needed any more, or not needed at all, or back in time, costs nobody an answer.
_ALONE: dict[tuple[Row, Column], frozenset[Answer]] = {
    **{(Row(Fault.KILL, Target.PROXY), column): OR_BROKEN for column in COLUMNS},
    **{(Row(Fault.KILL, Target.PREFILL), column): OR_UNAVAILABLE for column in UNTIL_OFFERED},
    **{(Row(Fault.KILL, Target.PREFILL), column): OR_TRANSFER_FAILED for column in (Column.OFFERED, Column.MID_FETCH)},
    **{(Row(Fault.KILL, Target.DECODE), column): OR_UNAVAILABLE for column in COLUMNS},
    # Frozen for as long as a call to it may take.
    **{
        (Row(Fault.FREEZE, Target.PREFILL), column): OR_TRANSFER_FAILED for column in (Column.OFFERED, Column.MID_FETCH)
    },
    # Who comes while it is away is told; what it has taken, it ends.
    (Row(Fault.RESTART, Target.PROXY), Column.BEFORE): OR_BROKEN,
    (Row(Fault.RESTART, Target.PREFILL), Column.BEFORE): OR_UNAVAILABLE,
    **{(Row(Fault.RESTART, Target.DECODE), column): OR_UNAVAILABLE for column in (*UNTIL_OFFERED, Column.OFFERED)},
    # The link that the request needs at that moment, for good.
    **{(Row(Fault.CUT), column): OR_UNAVAILABLE for column in (*UNTIL_OFFERED, *GENERATING)},
    **{(Row(Fault.CUT), column): OR_TRANSFER_FAILED for column in (Column.OFFERED, Column.MID_FETCH)},
    **{(Row(Fault.EXPIRY), column): OR_TRANSFER_FAILED for column in (Column.OFFERED, Column.MID_FETCH)},
    **{(Row(Fault.CORRUPT), column): OR_TRANSFER_FAILED for column in (Column.OFFERED, Column.MID_FETCH)},
}


def required(cell: Cell) -> frozenset[Answer]:
    """The answers that a cell may have. Whatever it is, no node holds a block or an offer one lease later."""
    if cell.row.fault is Fault.DISCONNECT:
        return LEFT
    if cell.policy is Policy.ALTERNATIVE:
        return RIGHT
    return _ALONE.get((cell.row, cell.column), RIGHT)


def loses_the_proxy(cell: Cell) -> bool:
    """Whether the fault takes the proxy from the client at this moment, who then asks at the other one if there is one.

    Everywhere else a connection that ends without the stream's end mark is a failure, however many proxies live.
    """
    return Answer.BROKEN in _ALONE.get((cell.row, cell.column), RIGHT)


def evidence(cell: Cell) -> tuple[str, ...]:
    """Words of which the route or the error must have one: the fault was met and seen, and tokens are not right by luck."""
    # Of a pull over gRPC that is under way, all may have left the owner's memory before it was damaged.
    is_read_later = cell.column is Column.OFFERED or cell.connector is not Connector.GRPC
    if cell.row.fault is Fault.CORRUPT and cell.column in FETCHING and is_read_later:
        return ("corrupt",)
    if cell.row.fault is Fault.EXPIRY and cell.column is not Column.FETCHED:
        # Not "timeout": that would be the pull's own clock, and say nothing of a late read.
        return ("expired", "stale")
    return ()


def must_be_forgotten(cell: Cell) -> bool:
    """Whether the owner has heard that its memory is damaged: whoever comes later must get nothing of what it holds."""
    return cell.row.fault is Fault.CORRUPT and bool(evidence(cell))


def impossible(row: Row, column: Column) -> str:
    """Why there is no such cell; empty when there is one."""
    if row.fault is Fault.EXPIRY and column not in FETCHING:
        if column in UNTIL_OFFERED:
            return "there is no offer yet whose lease could end"
        return "the offer was given back when decode had committed"
    if row.fault is Fault.CORRUPT and column is not Column.BEFORE and column not in (Column.OFFERED, Column.MID_FETCH):
        if column in UNTIL_OFFERED:
            return "a block has no checksum before it is complete: until then only its own engine uses it"
        return "decode has compared the checksums: from then on the bytes are its own memory"
    return ""


def connectors(row: Row, column: Column) -> tuple[Connector, ...]:
    """Over which connectors a cell is run. Shared memory crosses no network; the moments at which bytes move are run over each
    way of moving them, the others over one.
    """
    if row.fault in NETWORK:
        return (Connector.GRPC, Connector.NIXL)
    if row.fault is Fault.DISK_FULL:
        # Where offers are written to that disk too.
        return (Connector.SHM, Connector.FILE)
    if row.fault in (Fault.KILL, Fault.FREEZE) and row.target in PUSHED_BY and column in PUSHED_AT:
        return (Connector.SHM, Connector.PUSH)
    if column in (Column.MID_FETCH, Column.FETCHED) and row.target not in (Target.KVCACHE, Target.VALKEY):
        return (Connector.SHM, Connector.GRPC, Connector.NIXL)
    return (Connector.SHM,)


def all_cells() -> list[Cell]:
    """Every cell that can exist, those of one kind of mesh together."""
    cells = [
        Cell(row, column, policy, connector)
        for policy in Policy
        for connector in Connector
        for row in ROWS
        for column in COLUMNS
        if not impossible(row, column) and connector in connectors(row, column)
    ]
    return sorted(cells, key=lambda cell: cell.kind)


def covering() -> list[Cell]:
    """A few cells that together have every row, every column, both policies and every connector: what `./dev test` runs."""
    both = {Policy.ALTERNATIVE: _COVERING_ALTERNATIVE, Policy.ALONE: _COVERING_ALONE}
    cells = [
        Cell(row, column, policy, _COVERING_CONNECTORS.get(row.fault, Connector.SHM))
        for policy, chosen in both.items()
        for row, column in chosen
    ]
    cells.append(Cell(Row(Fault.KILL, Target.PREFILL), Column.MID_FETCH, Policy.ALONE, Connector.NIXL))
    cells.append(Cell(Row(Fault.KILL, Target.DECODE), Column.MID_PREFILL, Policy.ALONE, Connector.PUSH))
    return sorted(cells, key=lambda cell: cell.kind)


_COVERING_CONNECTORS = {Fault.DISK_FULL: Connector.FILE, **dict.fromkeys(NETWORK, Connector.GRPC)}
_COVERING_ALTERNATIVE = (
    (Row(Fault.KILL, Target.PROXY), Column.QUEUED),
    (Row(Fault.KILL, Target.PREFILL), Column.MID_PREFILL),
    (Row(Fault.KILL, Target.DECODE), Column.DECODING),
    (Row(Fault.KILL, Target.KVCACHE), Column.BEFORE),
    (Row(Fault.FREEZE, Target.PREFILL), Column.OFFERED),
    (Row(Fault.FREEZE, Target.VALKEY), Column.BEFORE),
    (Row(Fault.RESTART, Target.PROXY), Column.OFFERED),
    (Row(Fault.RESTART, Target.DECODE), Column.FETCHED),
    (Row(Fault.RESTART, Target.VALKEY), Column.QUEUED),
    (Row(Fault.EXPIRY), Column.OFFERED),
    (Row(Fault.CORRUPT), Column.OFFERED),
    (Row(Fault.WRONG_MODEL), Column.OFFERED),
    (Row(Fault.DROP), Column.MID_FETCH),
    (Row(Fault.DELAY), Column.MID_FETCH),
    (Row(Fault.CUT), Column.MID_FETCH),
)
_COVERING_ALONE = (
    (Row(Fault.KILL, Target.VALKEY), Column.MID_FETCH),
    (Row(Fault.FREEZE, Target.PROXY), Column.LAST),
    (Row(Fault.FREEZE, Target.DECODE), Column.MID_PREFILL),
    (Row(Fault.FREEZE, Target.KVCACHE), Column.QUEUED),
    (Row(Fault.RESTART, Target.PREFILL), Column.QUEUED),
    (Row(Fault.RESTART, Target.KVCACHE), Column.FETCHED),
    (Row(Fault.DISK_FULL), Column.QUEUED),
    (Row(Fault.CLOCK_SKEW), Column.OFFERED),
    (Row(Fault.DISCONNECT), Column.LAST),
)
