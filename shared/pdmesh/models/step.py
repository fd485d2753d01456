"""A StepBatch as a model wants it: tensors, KV slots, attention plans. Built once per step, used by every layer."""

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from pdmesh.engine.backend import StepBatch
from pdmesh.models.kv_layout import KVLayout
from pdmesh_kernels.paged_attention import AttentionPlan, AttentionRows, plan_attention


@dataclass(frozen=True, slots=True)
class GroupStep:
    """What differs between KV groups."""

    block_ids_T: torch.Tensor
    """Block that takes each token's key and value."""
    offsets_T: torch.Tensor
    """Slot inside it."""
    stale_blocks: torch.Tensor
    """Blocks to be zeroed before the step writes: it begins them, and would leave numbers of whoever had them before."""
    plan: AttentionPlan


@dataclass(frozen=True, slots=True)
class ModelStep:
    """T tokens; R of them want logits."""

    token_ids_T: torch.Tensor
    positions_T: torch.Tensor
    groups: list[GroupStep]
    logits_index_R: torch.Tensor


def make_step(batch: StepBatch, layouts: tuple[KVLayout, ...], dtype: torch.dtype) -> ModelStep:
    """Build the step of a model with these groups. Costs O(T + the step's blocks), and no Python loop over decode rows.

    Raises KernelArgumentError when a token has no block to go to, or lacks one that it sees.
    """
    row_T = np.repeat(np.arange(len(batch.context_len)), np.diff(batch.query_start))
    # Groups with the same window differ only in where their keys lie.
    plans: dict[int | None, AttentionPlan] = {}
    for tables, layout in zip(batch.block_tables, layouts, strict=True):
        if layout.window not in plans:
            plans[layout.window] = _plan(batch, tables, layout, dtype)
    return ModelStep(
        token_ids_T=torch.from_numpy(batch.token_ids),
        positions_T=torch.from_numpy(batch.positions),
        groups=[_group_step(batch, index, layout, row_T, plans[layout.window]) for index, layout in enumerate(layouts)],
        logits_index_R=torch.from_numpy(batch.logits_index),
    )


def _group_step(
    batch: StepBatch, index: int, layout: KVLayout, row_T: NDArray[np.int64], plan: AttentionPlan
) -> GroupStep:
    tables, block_size = batch.block_tables[index], layout.block_size
    block_ids = tables[row_T, batch.positions // block_size].astype(np.int64)
    offsets = batch.positions % block_size
    return GroupStep(
        block_ids_T=torch.from_numpy(block_ids),
        offsets_T=torch.from_numpy(offsets),
        stale_blocks=torch.from_numpy(_stale_blocks(batch, layout, block_ids, offsets)),
        plan=plan if tables is plan.rows.block_tables else plan.in_tables(tables),
    )


def _plan(batch: StepBatch, tables: NDArray[np.int32], layout: KVLayout, dtype: torch.dtype) -> AttentionPlan:
    rows = AttentionRows(
        query_start=batch.query_start,
        context_len=batch.context_len,
        block_tables=tables,
        block_size=layout.block_size,
        sliding_window=layout.window,
    )
    return plan_attention(rows, dtype)


def _stale_blocks(
    batch: StepBatch, layout: KVLayout, block_ids: NDArray[np.int64], offsets: NDArray[np.int64]
) -> NDArray[np.int64]:
    begun = offsets == 0
    if len(layout.layers) == layout.num_layers:
        # All of a block is written in the step that begins it, unless it is its row's last.
        lengths = np.diff(batch.query_start)
        ends = batch.context_len + lengths
        begun &= np.repeat(ends // layout.block_size, lengths) == batch.positions // layout.block_size
    # Else every block has places that nobody writes, and takes what is there along when it leaves this engine.
    stale: NDArray[np.int64] = block_ids[begun]
    return stale
