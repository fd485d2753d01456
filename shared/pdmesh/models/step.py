"""A StepBatch as a model wants it: tensors, KV slots, attention plans. Built once per step, used by every layer."""

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from pdmesh.engine.backend import StepBatch
from pdmesh_kernels.paged_attention import AttentionPlan, AttentionRows, plan_attention


@dataclass(frozen=True, slots=True)
class ModelStep:
    """T tokens; R of them want logits."""

    token_ids_T: torch.Tensor
    positions_T: torch.Tensor
    block_ids_T: torch.Tensor
    """Block that takes each token's key and value."""
    offsets_T: torch.Tensor
    """Slot inside it."""
    new_blocks: torch.Tensor
    """Blocks whose first slot this step writes and whose last it does not: what they held before shows behind the end."""
    plans: dict[int | None, AttentionPlan]
    """By sliding window."""
    logits_index_R: torch.Tensor


def make_step(batch: StepBatch, group: int, block_size: int, windows: set[int | None], dtype: torch.dtype) -> ModelStep:
    """Costs O(T + the step's blocks)."""
    tables = batch.block_tables[group]
    block_ids = _block_ids(batch, tables, block_size)
    ends = batch.context_len + np.diff(batch.query_start)
    last_starts = (ends - 1) // block_size * block_size
    is_new = (last_starts >= batch.context_len) & (ends % block_size != 0)
    new_blocks = [tables[row][last_starts[row] // block_size] for row in np.flatnonzero(is_new)]
    plans = {
        window: plan_attention(
            AttentionRows(
                query_start=batch.query_start,
                context_len=batch.context_len,
                block_tables=tables,
                block_size=block_size,
                sliding_window=window,
            ),
            dtype,
        )
        for window in windows
    }
    return ModelStep(
        token_ids_T=torch.from_numpy(batch.token_ids),
        positions_T=torch.from_numpy(batch.positions),
        block_ids_T=torch.from_numpy(block_ids),
        offsets_T=torch.from_numpy(batch.positions % block_size),
        new_blocks=torch.tensor(new_blocks, dtype=torch.int64),
        plans=plans,
        logits_index_R=torch.from_numpy(batch.logits_index),
    )


def _block_ids(batch: StepBatch, tables: list[list[int]], block_size: int) -> NDArray[np.int64]:
    indices = batch.positions // block_size
    found = np.empty(indices.shape, dtype=np.int64)
    for row, table in enumerate(tables):
        start, end = int(batch.query_start[row]), int(batch.query_start[row + 1])
        first, last = int(indices[start]), int(indices[end - 1])
        found[start:end] = np.asarray(table[first : last + 1])[indices[start:end] - first]
    return found
