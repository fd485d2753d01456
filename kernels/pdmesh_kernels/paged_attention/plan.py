"""What the CPU path works out once per step, so that each layer only gathers and multiplies.

Decode rows (one query) of about the same length share one gather and one batched attention; the others go row by row.
The legend: N rows, R of them in a group, M blocks per row, L keys.
"""

from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray

from pdmesh_kernels.checks import require
from pdmesh_kernels.paged_attention.rows import AttentionRows

# Rows share a group while the longest has at most this many times the blocks of the shortest: bounds the padding read.
MAX_LENGTH_RATIO = 2
# Keys that one group gathers, a longer row alone excepted: bounds what a layer needs beside the pool.
MAX_GROUP_KEYS = 1 << 15


@dataclass(frozen=True, slots=True)
class DecodeGroup:
    """Decode rows computed together."""

    tokens_R: torch.Tensor
    """Their query tokens' indices into T."""
    places: tuple[NDArray[np.int64], NDArray[np.int64]]
    """Rows [R, 1] and columns [R, M] of the block tables; a shorter row repeats its own first block, so nobody else's numbers
    are touched even under the mask."""
    blocks: torch.Tensor
    """[R * M], what lies there."""
    num_blocks: int
    """M"""
    mask_R11L: torch.Tensor | None
    """0 or -inf, added to the scores; None when every row is exactly M full blocks."""


@dataclass(frozen=True, slots=True)
class PrefillRow:
    """One row with several queries."""

    places: tuple[int, NDArray[np.int64]]
    """Row, and columns [M], of the block tables."""
    start: int
    """Its first query's index into T."""
    num_queries: int
    first_key: int
    """Position of the first key gathered: the start of a block."""
    end_key: int
    """One past its last query's position."""
    blocks_M: torch.Tensor


@dataclass(frozen=True, slots=True)
class AttentionPlan:
    rows: AttentionRows
    decode_groups: list[DecodeGroup]
    prefill_rows: list[PrefillRow]
    num_columns: int
    """Of the block tables that are looked at."""

    def in_tables(self, block_tables: NDArray[np.int32]) -> "AttentionPlan":
        """Return the plan of the same rows whose keys lie in other blocks; cheaper than a new one. Raises as that does."""
        _require_size(block_tables, self.rows.block_tables.shape[0], self.num_columns)
        return AttentionPlan(
            replace(self.rows, block_tables=block_tables),
            [replace(group, blocks=_as_blocks(block_tables[group.places])) for group in self.decode_groups],
            [replace(row, blocks_M=_as_blocks(block_tables[row.places])) for row in self.prefill_rows],
            self.num_columns,
        )


@dataclass(frozen=True, slots=True)
class _Spans:
    """Which keys each row reads."""

    lowest_N: NDArray[np.int64]
    """Position of the first key that one of its queries sees."""
    ends_N: NDArray[np.int64]
    """One past its last query's position."""
    first_blocks_N: NDArray[np.int64]
    num_blocks_N: NDArray[np.int64]


def plan_attention(rows: AttentionRows, dtype: torch.dtype) -> AttentionPlan:
    """Sort a step's rows into groups; `dtype` is the scores'. Costs O(blocks of the step), no tensor of the pool is read.

    Raises KernelArgumentError where a row lacks a block that it must read.
    """
    lengths = np.diff(rows.query_start)
    spans = _spans(rows, lengths)
    num_columns = int((spans.first_blocks_N + spans.num_blocks_N).max(initial=0))
    _require_size(rows.block_tables, len(lengths), num_columns)
    prefill_rows = [_prefill_row(rows, spans, row) for row in np.flatnonzero(lengths > 1).tolist()]
    decode = np.flatnonzero(lengths == 1)
    decode = decode[np.argsort(spans.num_blocks_N[decode], kind="stable")]
    groups = []
    while decode.size:
        size = _group_size(spans.num_blocks_N[decode], rows.block_size)
        groups.append(_decode_group(rows, spans, decode[:size], dtype))
        decode = decode[size:]
    return AttentionPlan(rows, groups, prefill_rows, num_columns)


def _spans(rows: AttentionRows, lengths: NDArray[np.int64]) -> _Spans:
    ends = rows.context_len + lengths
    lowest = np.zeros_like(ends)
    if rows.sliding_window is not None:
        lowest = np.maximum(rows.context_len + 1 - rows.sliding_window, 0)
    first_blocks = lowest // rows.block_size
    return _Spans(lowest, ends, first_blocks, -(-ends // rows.block_size) - first_blocks)


def _prefill_row(rows: AttentionRows, spans: _Spans, row: int) -> PrefillRow:
    first, count = int(spans.first_blocks_N[row]), int(spans.num_blocks_N[row])
    places = (row, np.arange(first, first + count))
    return PrefillRow(
        places=places,
        start=int(rows.query_start[row]),
        num_queries=int(rows.query_start[row + 1] - rows.query_start[row]),
        first_key=first * rows.block_size,
        end_key=int(spans.ends_N[row]),
        blocks_M=_as_blocks(rows.block_tables[places]),
    )


def _group_size(num_blocks: NDArray[np.int64], block_size: int) -> int:
    """Return how many of the rows, shortest first, go together; at least one."""
    alike = int(np.searchsorted(num_blocks, MAX_LENGTH_RATIO * num_blocks[0], side="right"))
    keys = np.arange(1, alike + 1) * num_blocks[:alike] * block_size
    return max(int(np.searchsorted(keys, MAX_GROUP_KEYS, side="right")), 1)


def _decode_group(rows: AttentionRows, spans: _Spans, members: NDArray[np.int64], dtype: torch.dtype) -> DecodeGroup:
    first, count = spans.first_blocks_N[members, None], spans.num_blocks_N[members, None]
    width = int(count.max())
    column = np.arange(width)
    places = (members[:, None], first + np.where(column < count, column, 0))
    # Key positions relative to the gathered part: [lowest, highest) are seen.
    origin = first * rows.block_size
    lowest, highest = spans.lowest_N[members, None] - origin, spans.ends_N[members, None] - origin
    mask = None
    num_keys = width * rows.block_size
    if (lowest > 0).any() or (highest < num_keys).any():
        keys = np.arange(num_keys)
        hidden = (keys < lowest) | (keys >= highest)
        mask = torch.zeros(hidden.shape, dtype=dtype).masked_fill_(torch.from_numpy(hidden), -torch.inf)
        mask = mask[:, None, None, :]
    return DecodeGroup(
        tokens_R=torch.from_numpy(rows.query_start[members]),
        places=places,
        blocks=_as_blocks(rows.block_tables[places]),
        num_blocks=width,
        mask_R11L=mask,
    )


def _require_size(block_tables: NDArray[np.int32], num_rows: int, num_columns: int) -> None:
    found = block_tables.shape
    is_enough = len(found) == 2 and found[0] == num_rows and found[1] >= num_columns
    require(is_enough, "paged_attention", f"block tables are {list(found)}, the rows need [{num_rows}, {num_columns}]")


def _as_blocks(ids: NDArray[np.int32]) -> torch.Tensor:
    """Make an index of the pool; a negative one would read another sequence's block."""
    require(int(ids.min()) >= 0, "paged_attention", "a row's block table lacks a block that its queries see")
    return torch.from_numpy(ids.astype(np.int64).reshape(-1))
