"""What the CPU path works out once per step, so that each layer only gathers and multiplies.

Decode rows (one query) of about the same length share one gather and one batched attention; the others go row by row.
The legend: R rows of a group, M blocks per row, G queries per KV head, L keys.
"""

from dataclasses import dataclass

import numpy as np
import torch

from pdmesh_kernels.paged_attention.rows import AttentionRows

# Rows share a group while the longest has at most this many times the blocks of the shortest: bounds the padding read.
MAX_LENGTH_RATIO = 2


@dataclass(frozen=True, slots=True)
class DecodeGroup:
    """Decode rows computed together."""

    tokens_R: torch.Tensor
    """Their query tokens' indices into T."""
    blocks: torch.Tensor
    """[R * M]; a shorter row repeats its own first block, so nobody else's numbers are touched even under the mask."""
    num_blocks: int
    """M"""
    mask_R11L: torch.Tensor | None
    """0 or -inf, added to the scores; None when every row is exactly M full blocks."""


@dataclass(frozen=True, slots=True)
class PrefillRow:
    """One row with several queries."""

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


def plan_attention(rows: AttentionRows, dtype: torch.dtype) -> AttentionPlan:
    """Sort a step's rows into groups; `dtype` is the scores'. Costs O(blocks of the step), no tensor of the pool is read."""
    lengths = np.diff(rows.query_start)
    ends = rows.context_len + lengths
    seen = ends if rows.sliding_window is None else np.minimum(ends, rows.sliding_window + lengths - 1)
    first_blocks = (ends - seen) // rows.block_size
    end_blocks = -(-ends // rows.block_size)
    prefill_rows = [
        PrefillRow(
            start=int(rows.query_start[row]),
            num_queries=int(lengths[row]),
            first_key=int(first_blocks[row]) * rows.block_size,
            end_key=int(ends[row]),
            blocks_M=torch.tensor(rows.block_tables[row][first_blocks[row] : end_blocks[row]]),
        )
        for row in np.flatnonzero(lengths > 1)
    ]
    decode = np.flatnonzero(lengths == 1)
    num_blocks = end_blocks - first_blocks
    decode = decode[np.argsort(num_blocks[decode], kind="stable")]
    groups = []
    while decode.size:
        limit = MAX_LENGTH_RATIO * num_blocks[decode[0]]
        size = int(np.searchsorted(num_blocks[decode], limit, side="right"))
        groups.append(_decode_group(rows, decode[:size], first_blocks, end_blocks, ends, seen, dtype))
        decode = decode[size:]
    return AttentionPlan(rows, groups, prefill_rows)


def _decode_group(
    rows: AttentionRows,
    members: np.ndarray,
    first_blocks: np.ndarray,
    end_blocks: np.ndarray,
    ends: np.ndarray,
    seen: np.ndarray,
    dtype: torch.dtype,
) -> DecodeGroup:
    width = int((end_blocks - first_blocks)[members].max())
    table = np.empty((members.size, width), dtype=np.int64)
    for index, row in enumerate(members):
        own = rows.block_tables[row][first_blocks[row] : end_blocks[row]]
        table[index, : len(own)] = own
        table[index, len(own) :] = own[0]
    # Key positions relative to the gathered part: [lowest, highest) are seen.
    origin = first_blocks[members] * rows.block_size
    lowest, highest = (ends - seen)[members] - origin, ends[members] - origin
    mask = None
    num_keys = width * rows.block_size
    if (lowest > 0).any() or (highest < num_keys).any():
        keys = np.arange(num_keys)
        hidden = (keys < lowest[:, None]) | (keys >= highest[:, None])
        mask = torch.zeros(hidden.shape, dtype=dtype).masked_fill_(torch.from_numpy(hidden), -torch.inf)
        mask = mask[:, None, None, :]
    return DecodeGroup(
        tokens_R=torch.from_numpy(rows.query_start[members]),
        blocks=torch.from_numpy(table.reshape(-1)),
        num_blocks=width,
        mask_R11L=mask,
    )
