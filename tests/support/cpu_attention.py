"""Steps of attention for the CPU library's tests: a shuffled pool full of other sequences' NaN, and what the answer is."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from pdmesh_kernels.cpu.abi import KV, AttentionArgs, Batch, DType, HeadsArgs, Isa
from pdmesh_kernels.cpu.kv_layout import ITEM_DTYPES, KVItems, PackedLayout
from pdmesh_kernels.cpu.library import Library, Pool

NUM_LAYERS, LAYER = 2, 1
LIBRARY_DTYPES = {"float32": DType.F32, "bfloat16": DType.BF16, "int8": DType.I8}
GARBAGE = 1e4


@dataclass(frozen=True, kw_only=True)
class Step:
    """Sequences of (queries, context) over one KV group. `seed` fixes the numbers, `order` only where blocks lie."""

    sequences: tuple[tuple[int, int], ...]
    layout: PackedLayout
    group_size: int = 3
    window: int = 0
    soft_cap: float = 0.0
    pool: NDArray[np.uint8]
    tables: NDArray[np.int32]
    queries: torch.Tensor
    """[T, H, P] float32, or bfloat16."""
    scale: float = field(default=0.0)

    @property
    def num_tokens(self) -> int:
        return sum(queries for queries, _ in self.sequences)

    @property
    def num_heads(self) -> int:
        return self.group_size * self.layout.num_kv_heads

    @cached_property
    def arrays(self) -> dict[str, NDArray[Any]]:
        starts = np.cumsum([0, *(queries for queries, _ in self.sequences)]).astype(np.int64)
        positions = [np.arange(context, context + queries) for queries, context in self.sequences]
        return {
            "query_start": starts,
            "context_len": np.array([context for _, context in self.sequences], np.int64),
            "positions": np.concatenate(positions).astype(np.int64),
            "token_ids": np.zeros(self.num_tokens, np.int64),
            "logits_index": np.zeros(1, np.int64),
        }

    def batch(self) -> Batch:
        pointers = {name: array.ctypes.data for name, array in self.arrays.items()}
        return Batch(
            num_tokens=self.num_tokens,
            num_sequences=len(self.sequences),
            table_width=self.tables.shape[1],
            num_groups=1,
            block_tables=(ctypes.c_void_p * 1)(self.tables.ctypes.data),
            **pointers,
        )

    def kv(self) -> KV:
        layout = self.layout
        return KV(
            blocks=self.pool.ctypes.data,
            block_bytes=self.pool.shape[1],
            layer_offset=LAYER * layout.layer_bytes,
            head_bytes=layout.head_bytes,
            num_blocks=len(self.pool),
            block_size=layout.block_size,
            num_kv_heads=layout.num_kv_heads,
            head_dim=layout.head_dim,
            dtype=LIBRARY_DTYPES[layout.item_type],
            window=self.window,
        )

    def attend(self, library: Library, isa: Isa, num_threads: int = 1) -> torch.Tensor:
        """Return [T, H, D]; NaN where nothing was written."""
        width = self.num_heads * self.layout.head_dim
        output = torch.full((self.num_tokens, width + 8), torch.nan, dtype=self.queries.dtype)
        args = AttentionArgs(
            queries=self.queries.data_ptr(),
            output=output.data_ptr(),
            output_stride=width + 8,
            num_heads=self.num_heads,
            scale=self.scale,
            soft_cap=self.soft_cap,
            kv=ctypes.pointer(self.kv()),
        )
        _call(library, "pdm_attention", isa, num_threads, args, self.batch())
        assert output[:, width:].isnan().all()
        return output[:, :width].reshape(self.num_tokens, self.num_heads, -1)

    def wanted(self) -> torch.Tensor:
        """Return the answer for the stored keys and values, in double precision."""
        items_NJKSD = stored_items(self.layout, self.pool)
        rows = []
        for index, (queries, context) in enumerate(self.sequences):
            length, size = context + queries, self.layout.block_size
            table = self.tables[index, : -(-length // size)]
            keys_JKLD = items_NJKSD[np.maximum(table, 0)].permute(1, 2, 0, 3, 4).flatten(2, 3)[:, :, :length]
            keys_JKLD = keys_JKLD.nan_to_num().repeat_interleave(self.group_size, dim=0)
            start = self.arrays["query_start"][index]
            q_HQD = self.queries[start : start + queries, :, : self.layout.head_dim].double().transpose(0, 1)
            scores_HQL = q_HQD @ keys_JKLD[:, 0].transpose(1, 2) * self.scale
            if self.soft_cap:
                scores_HQL = self.soft_cap * torch.tanh(scores_HQL / self.soft_cap)
            behind_QL = torch.arange(context, length)[:, None] - torch.arange(length)
            hidden_QL = (behind_QL < 0) | ((behind_QL >= self.window) if self.window else False)
            shares_HQL = scores_HQL.masked_fill(hidden_QL, -torch.inf).softmax(dim=-1)
            rows.append((shares_HQL @ keys_JKLD[:, 1]).transpose(0, 1))
        return torch.cat(rows)


def make_step(
    sequences: tuple[tuple[int, int], ...],
    layout: PackedLayout,
    *,
    group_size: int = 3,
    window: int = 0,
    soft_cap: float = 0.0,
    spread: float = 1.0,
) -> Step:
    """Make a step. Blocks of nobody hold NaN, and so do the other layers; what is behind a sequence's end is large but finite,
    blocks before a window are missing."""
    random = np.random.default_rng([*np.ravel(sequences), layout.head_dim, layout.block_size])
    size = layout.block_size
    needed = [-(-(queries + context) // size) for queries, context in sequences]
    num_blocks = sum(needed) + 3
    order = random.permutation(num_blocks).tolist()
    tables = np.full((len(sequences), max(needed) + 1), -1, np.int32)
    pool = np.full((num_blocks, layout.block_bytes + 64), 0xFF, np.uint8)
    for index, (queries, context) in enumerate(sequences):
        passed = max(0, context + 1 - window) // size if window else 0
        for column in range(passed, needed[index]):
            tables[index, column] = order.pop()
            used = queries + context - column * size
            _fill(layout, pool[tables[index, column]], random, min(used, size), spread)
    num_tokens, num_heads = sum(queries for queries, _ in sequences), group_size * layout.num_kv_heads
    queries = torch.zeros(num_tokens, num_heads, layout.padded_dim)
    shape = (num_tokens, num_heads, layout.head_dim)
    queries[..., : layout.head_dim] = torch.from_numpy(random.standard_normal(shape).astype(np.float32) * 2)
    return Step(
        sequences=sequences,
        layout=layout,
        group_size=group_size,
        window=window,
        soft_cap=soft_cap,
        pool=pool,
        tables=tables,
        queries=queries if layout.item_type == "float32" else queries.bfloat16(),
        scale=layout.head_dim**-0.5,
    )


def _fill(
    layout: PackedLayout, block: NDArray[np.uint8], random: np.random.Generator, used: int, spread: float
) -> None:
    shape = (1, NUM_LAYERS, layout.num_kv_heads, 2, layout.block_size, layout.head_dim)
    floats = torch.full(shape, torch.nan)
    floats[:, LAYER] = GARBAGE
    drawn = random.standard_normal((layout.num_kv_heads, 2, used, layout.head_dim)).astype(np.float32)
    floats[0, LAYER, :, :, :used] = torch.from_numpy(drawn * spread)
    scales = None
    items: NDArray[Any] = floats.numpy()
    if layout.item_type == "bfloat16":
        items = floats.bfloat16().view(torch.uint16).numpy()
    elif layout.item_type == "int8":
        codes_and_scales = quantized(floats)
        items, scales = codes_and_scales[0].numpy(), codes_and_scales[1].numpy()
    layout.pack(KVItems(items=items, scales=scales), block[None])


def quantized(floats: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return int8 codes and scales per token and head: the largest magnitude is 127."""
    largest = floats.abs().amax(dim=-1)
    factors = torch.where(largest > 0, 127.0 / largest, 0.0)
    return (floats * factors[..., None]).nan_to_num().round().to(torch.int8), largest / 127.0


def stored_items(layout: PackedLayout, pool: NDArray[np.uint8]) -> torch.Tensor:
    """Return what the tested layer holds, [N, J, 2, S, D] in double precision."""
    unpacked = layout.unpack(pool)
    items = torch.from_numpy(unpacked.items[:, LAYER])
    if layout.item_type == "bfloat16":
        return items.view(torch.bfloat16).double()
    if unpacked.scales is not None:
        return items.double() * torch.from_numpy(unpacked.scales[:, LAYER]).double()[..., None]
    return items.double()


def make_layout(item_type: str, head_dim: int = 64, block_size: int = 32, num_kv_heads: int = 2) -> PackedLayout:
    assert item_type in ITEM_DTYPES
    return PackedLayout(
        item_type=item_type,  # type: ignore[arg-type]
        num_layers=NUM_LAYERS,
        num_kv_heads=num_kv_heads,
        block_size=block_size,
        head_dim=head_dim,
    )


def run_heads(
    library: Library,
    isa: Isa,
    step: Step,
    qkv: torch.Tensor,
    angles: torch.Tensor,
    *,
    gains: tuple[torch.Tensor, torch.Tensor] | None = None,
    epsilon: float = 1e-5,
    is_interleaved: bool = False,
    num_threads: int = 1,
) -> torch.Tensor:
    """Write the step's keys and values to its pool; return the queries [T, H, P]."""
    queries = torch.full((step.num_tokens, step.num_heads, step.layout.padded_dim), torch.nan, dtype=step.queries.dtype)
    args = HeadsArgs(
        qkv=qkv.data_ptr(),
        qkv_stride=qkv.stride(0),
        qkv_dtype=DType.F32 if qkv.dtype == torch.float32 else DType.BF16,
        num_heads=step.num_heads,
        q_gain=gains[0].data_ptr() if gains else None,
        k_gain=gains[1].data_ptr() if gains else None,
        epsilon=epsilon,
        rotary_dim=angles.shape[1],
        is_interleaved=is_interleaved,
        queries=queries.data_ptr(),
        kv=ctypes.pointer(step.kv()),
        angles=angles.data_ptr(),
    )
    _call(library, "pdm_heads", isa, num_threads, args, step.batch())
    return queries


def _call(library: Library, name: str, isa: Isa, num_threads: int, args: ctypes.Structure, batch: Batch) -> None:
    pool = Pool(library, num_threads)
    try:
        library.call(name, pool.handle, isa, ctypes.byref(args), ctypes.byref(batch))
    finally:
        pool.close()
