"""A small decoder twice: as a program of the CPU library, and as plain torch in float32."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch.nn import functional as F

from pdmesh_kernels.cpu.abi import (
    KV,
    AttentionArgs,
    Batch,
    DType,
    EmbedArgs,
    Epilogue,
    Format,
    HeadsArgs,
    Isa,
    LinearArgs,
    NormArgs,
)
from pdmesh_kernels.cpu.library import Library, Pool
from pdmesh_kernels.cpu.packing import PackedWeight, pack_values

VOCABULARY, HIDDEN, HEADS, KV_HEADS, HEAD_DIM, INTERMEDIATE = 131, 96, 6, 2, 40, 112
PADDED = 64
BLOCK, NUM_BLOCKS, EPSILON, SCALE = 32, 64, 1e-5, HEAD_DIM**-0.5
WINDOWS = (0, 50)
"""Of each layer, which is a KV group of its own."""


@dataclass(frozen=True)
class Chunk:
    """Tokens of one sequence in a step, with the block table of each group."""

    token_ids: Sequence[int]
    context_len: int
    tables: tuple[Sequence[int], Sequence[int]]


class Weights:
    """Random ones, exact in bfloat16."""

    def __init__(self, seed: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed)

        def random(rows: int, columns: int) -> torch.Tensor:
            return (torch.randn(rows, columns, generator=generator) * columns**-0.5).bfloat16().float()

        self.table, self.head = random(VOCABULARY, HIDDEN) * 8, random(VOCABULARY, HIDDEN)
        self.gain = torch.rand(HIDDEN, generator=generator) + 0.5
        self.frequencies = 10000.0 ** -(torch.arange(HEAD_DIM // 2) / (HEAD_DIM / 2))
        width = HEADS * HEAD_DIM
        self.layers = [
            {
                "qkv": random(width + 2 * KV_HEADS * HEAD_DIM, HIDDEN),
                "out": random(HIDDEN, width),
                "up": random(2 * INTERMEDIATE, HIDDEN),
                "down": random(HIDDEN, INTERMEDIATE),
            }
            for _ in WINDOWS
        ]

    def logits(self, token_ids: Sequence[int]) -> torch.Tensor:
        """Return those of every position of one sequence."""
        x = self.table[list(token_ids)]
        angles = torch.arange(len(token_ids))[:, None] * self.frequencies
        for layer, window in zip(self.layers, WINDOWS, strict=True):
            x = x + self._attend(F.linear(self._norm(x), layer["qkv"]), angles, window) @ layer["out"].T
            gate, up = F.linear(self._norm(x), layer["up"]).chunk(2, dim=-1)
            x = x + F.linear(F.silu(gate) * up, layer["down"])
        return F.linear(self._norm(x), self.head)

    def _norm(self, x: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(x, (HIDDEN,), self.gain, EPSILON)

    @staticmethod
    def _attend(qkv: torch.Tensor, angles: torch.Tensor, window: int) -> torch.Tensor:
        heads = qkv.view(len(qkv), -1, HEAD_DIM).transpose(0, 1)
        q, k, v = heads.split((HEADS, KV_HEADS, KV_HEADS))

        def turned(x: torch.Tensor) -> torch.Tensor:
            low, high = x.chunk(2, dim=-1)
            return torch.cat(
                (low * angles.cos() - high * angles.sin(), high * angles.cos() + low * angles.sin()), dim=-1
            )

        distance = torch.arange(len(qkv))[:, None] - torch.arange(len(qkv))
        mask = (distance >= 0) & (distance < window if window else True)
        groups = HEADS // KV_HEADS
        k, v = turned(k).repeat_interleave(groups, 0), v.repeat_interleave(groups, 0)
        return F.scaled_dot_product_attention(turned(q), k, v, mask, scale=SCALE).transpose(0, 1).reshape(len(qkv), -1)


class Decoder:
    """The program and its pool, whose bytes are NaN until they are written."""

    def __init__(self, library: Library, isa: Isa, weights: Weights, format: Format) -> None:
        self.library, self._weights, self._format = library, weights, format
        self._is_f32 = format is Format.F32
        self.dtype = DType.F32 if self._is_f32 else DType.BF16
        self._kept: list[Any] = []
        self._handle = library.functions.pdm_program_create(isa)
        assert self._handle, library.last_error()
        head_bytes = library.functions.pdm_kv_head_bytes(self.dtype, BLOCK, HEAD_DIM)
        block_bytes = KV_HEADS * head_bytes
        self.pools = [_aligned_nan(NUM_BLOCKS * block_bytes) for _ in WINDOWS]
        self._kv = [
            KV(
                blocks=pool.ctypes.data,
                block_bytes=block_bytes,
                layer_offset=0,
                head_bytes=head_bytes,
                num_blocks=NUM_BLOCKS,
                block_size=BLOCK,
                num_kv_heads=KV_HEADS,
                head_dim=HEAD_DIM,
                dtype=self.dtype,
                window=window,
            )
            for pool, window in zip(self.pools, WINDOWS, strict=True)
        ]
        self._describe()

    def close(self) -> None:
        self.library.functions.pdm_program_destroy(self._handle)

    def step(self, pool: Pool, chunks: Sequence[Chunk]) -> tuple[np.ndarray, np.ndarray]:
        """Return the logits of each token, in the order of the chunks, and the ids of the largest."""
        starts = np.cumsum([0, *(len(chunk.token_ids) for chunk in chunks)], dtype=np.int64)
        num_tokens = int(starts[-1])
        token_ids = np.concatenate([np.asarray(chunk.token_ids, np.int64) for chunk in chunks])
        positions = np.concatenate([np.arange(len(c.token_ids), dtype=np.int64) + c.context_len for c in chunks])
        context = np.array([chunk.context_len for chunk in chunks], dtype=np.int64)
        width = max(len(table) for chunk in chunks for table in chunk.tables)
        tables = np.full((len(WINDOWS), len(chunks), width), -1, dtype=np.int32)
        for row, chunk in enumerate(chunks):
            for group, table in enumerate(chunk.tables):
                tables[group, row, : len(table)] = table
        pointers = (ctypes.c_void_p * len(WINDOWS))(*(table.ctypes.data for table in tables))
        index = np.arange(num_tokens, dtype=np.int64)
        logits = np.full((num_tokens, VOCABULARY), np.nan, dtype=np.float32)
        best = np.full(num_tokens, -7, dtype=np.int32)
        batch = Batch(
            num_tokens=num_tokens,
            num_sequences=len(chunks),
            table_width=width,
            num_groups=len(WINDOWS),
            token_ids=token_ids.ctypes.data,
            positions=positions.ctypes.data,
            query_start=starts.ctypes.data,
            context_len=context.ctypes.data,
            block_tables=pointers,
            logits_index=index.ctypes.data,
            num_logits=num_tokens,
        )
        run = [self._handle, pool.handle, ctypes.byref(batch), logits.ctypes.data, best.ctypes.data]
        self.library.call("pdm_program_run", *run)
        return logits, best

    @cached_property
    def _gain(self) -> np.ndarray:
        return self._weights.gain.numpy()

    def _describe(self) -> None:
        x, normed = self._buffer(DType.F32, HIDDEN), self._buffer(self.dtype, HIDDEN)
        qkv = self._buffer(self.dtype, (HEADS + 2 * KV_HEADS) * HEAD_DIM)
        queries = self._buffer(self.dtype, HEADS * PADDED)
        attended, gated = self._buffer(self.dtype, HEADS * HEAD_DIM), self._buffer(self.dtype, INTERMEDIATE)
        frequencies = self._weights.frequencies.numpy()
        angles = self._add("angles", frequencies.ctypes.data, HEAD_DIM, 1.0)
        self._add("embed", EmbedArgs(table=self._weight(self._weights.table), scale=1.0), x)
        for group, layer in enumerate(self._weights.layers):
            kv = ctypes.pointer(self._kv[group])
            heads = HeadsArgs(
                qkv_dtype=self.dtype, num_heads=HEADS, kv=kv, group=group, epsilon=EPSILON, rotary_dim=HEAD_DIM
            )
            heads.frequencies, heads.rotary_factor = frequencies.ctypes.data, 1.0
            attention = AttentionArgs(num_heads=HEADS, scale=SCALE, kv=kv, group=group)
            self._add("norm", self._norm_args(), x, normed)
            self._linear(layer["qkv"], Epilogue.STORE, self.dtype, normed, qkv)
            self._add("heads", heads, qkv, queries, angles)
            self._add("attention", attention, queries, attended)
            self._linear(layer["out"], Epilogue.ADD, DType.F32, attended, x)
            self._add("norm", self._norm_args(), x, normed)
            self._linear(layer["up"], Epilogue.SILU_MUL, self.dtype, normed, gated)
            self._linear(layer["down"], Epilogue.ADD, DType.F32, gated, x)
        head = LinearArgs(weight=self._weight(self._weights.head), epilogue=Epilogue.LOGITS, output_dtype=DType.F32)
        norm = self._norm_args()
        self.library.call("pdm_program_logits", self._handle, ctypes.byref(norm), ctypes.byref(head), x)

    def _buffer(self, dtype: DType, width: int) -> int:
        return self.library.call("pdm_program_buffer", self._handle, dtype, width)

    def _add(self, name: str, first: Any, *numbers: Any) -> int:
        given = first if isinstance(first, int) else ctypes.byref(first)
        return self.library.call(f"pdm_program_{name}", self._handle, given, *numbers)

    def _norm_args(self) -> NormArgs:
        gain = self._gain.ctypes.data
        return NormArgs(width=HIDDEN, gain=gain, epsilon=EPSILON, input_dtype=DType.F32, output_dtype=self.dtype)

    def _linear(self, values: torch.Tensor, epilogue: Epilogue, dtype: DType, source: int, target: int) -> None:
        weight = self._weight(values, is_gated=epilogue is Epilogue.SILU_MUL)
        self._add("linear", LinearArgs(weight=weight, epilogue=epilogue, output_dtype=dtype), source, target)

    def _weight(self, values: torch.Tensor, is_gated: bool = False) -> Any:
        packed: PackedWeight = pack_values(self.library, self._format, values, is_gated=is_gated)
        structure = packed.structure()
        self._kept += [packed, structure]
        return ctypes.pointer(structure)


def _aligned_nan(num_bytes: int) -> np.ndarray:
    memory = np.full(num_bytes + 64, 0xFF, np.uint8)
    start = -memory.ctypes.data % 64
    return memory[start : start + num_bytes]
