"""A decoder as a program of the CPU library: its operations in order, over weights, a KV pool and buffers of its own.

The legend is that of `decoder`.
"""

import ctypes
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pdmesh.engine.backend import StepBatch
from pdmesh.models.cpu_weights import CpuWeights
from pdmesh.models.kv_layout import KVLayout
from pdmesh.models.model_config import Activation, ModelConfig
from pdmesh.models.weight_plan import Gain, LayerPlan, Projection
from pdmesh_kernels.cpu.abi import (
    KV,
    AttentionArgs,
    Batch,
    DType,
    EmbedArgs,
    Epilogue,
    HeadsArgs,
    Isa,
    LinearArgs,
    NormArgs,
    Weight,
)
from pdmesh_kernels.cpu.library import Library, LibraryError, Pool
from pdmesh_kernels.rotary_frequencies import RotarySpec, inverse_frequencies

GATES = {Activation.SILU: Epilogue.SILU_MUL, Activation.GELU_TANH: Epilogue.GELU_MUL}
KV_DTYPES = {"float32": DType.F32, "bfloat16": DType.BF16, "int8": DType.I8}


class CpuProgram:
    """Runs steps. Borrows `weights` and `blocks`, which it keeps alive; `close` frees it."""

    def __init__(
        self,
        library: Library,
        isa: Isa,
        config: ModelConfig,
        weights: CpuWeights,
        layouts: tuple[KVLayout, ...],
        blocks: NDArray[np.uint8],
        *,
        has_int8_rows: bool = False,
    ) -> None:
        """`blocks` is the KV pool [num_blocks, block_bytes], 64-byte aligned. `has_int8_rows`: weights in 4 bits are multiplied
        with activations in 8."""
        self._library, self._config, self._weights = library, config, weights
        self._has_int8_rows = has_int8_rows
        self._kv_dtype = KV_DTYPES[layouts[0].dtype]
        # Beside int8 keys and values the library computes in bf16 only.
        self._dtype = DType.F32 if self._kv_dtype is DType.F32 else DType.BF16
        self._num_groups = len(layouts)
        self._kept: list[Any] = [blocks]
        self._batch: StepBatch | None = None
        """Whose arrays `_given` points to."""
        self._tables: list[NDArray[np.int32]] = []
        self._given: Any = None
        self._handle: int | None = library.functions.pdm_program_create(isa)
        if not self._handle:
            raise LibraryError(library.last_error())
        places = {layer: (group, at) for group, layout in enumerate(layouts) for at, layer in enumerate(layout.layers)}
        self._describe(layouts, blocks, places)

    def run(self, pool: Pool, batch: StepBatch) -> tuple[NDArray[np.float32], NDArray[np.int32]]:
        """Write the KV of all tokens; return logits [R, V] and the ids of the largest [R], -1 where one is NaN."""
        if batch is not self._batch:
            self._take(batch)
        num_logits = len(batch.logits_index)
        logits = np.empty((num_logits, self._config.vocab_size), dtype=np.float32)
        best_ids = np.empty(num_logits, dtype=np.int32)
        self._library.call(
            "pdm_program_run",
            self._handle,
            pool.handle,
            self._given,
            logits.ctypes.data,
            best_ids.ctypes.data,
        )
        return logits, best_ids

    def _take(self, batch: StepBatch) -> None:
        """Note where a batch's arrays are. Nearly all steps come in those of the step before."""
        tables = [np.ascontiguousarray(table, dtype=np.int32) for table in batch.block_tables]
        given = Batch(
            num_tokens=len(batch.token_ids),
            num_sequences=len(batch.context_len),
            table_width=tables[0].shape[1],
            num_groups=self._num_groups,
            token_ids=batch.token_ids.ctypes.data,
            positions=batch.positions.ctypes.data,
            query_start=batch.query_start.ctypes.data,
            context_len=batch.context_len.ctypes.data,
            block_tables=(ctypes.c_void_p * len(tables))(*(table.ctypes.data for table in tables)),
            logits_index=batch.logits_index.ctypes.data,
            num_logits=len(batch.logits_index),
        )
        is_copied = any(mine is not its for mine, its in zip(tables, batch.block_tables, strict=True))
        # A copy would not follow its original.
        self._batch = None if is_copied else batch
        self._tables = tables
        self._given = ctypes.byref(given)

    def num_bytes(self, num_tokens: int, num_logits: int) -> int:
        """Return the bytes of activations that a step of that size takes."""
        size: int = self._library.functions.pdm_program_bytes(self._handle, num_tokens, num_logits)
        return size

    def close(self) -> None:
        if self._handle:
            self._library.functions.pdm_program_destroy(self._handle)
        self._handle = None

    def _describe(
        self, layouts: tuple[KVLayout, ...], blocks: NDArray[np.uint8], places: dict[int, tuple[int, int]]
    ) -> None:
        config, dtype, plan = self._config, self._dtype, self._weights.plan
        padded = layouts[0].cpu_layout().padded_dim
        x, normed = self._buffer(DType.F32, config.hidden_size), self._buffer(dtype, config.hidden_size)
        qkv = self._buffer(dtype, (config.num_heads + 2 * config.num_kv_heads) * config.head_dim)
        queries = self._buffer(dtype, config.num_heads * padded)
        attended = self._buffer(dtype, config.num_heads * config.head_dim)
        gated = self._buffer(dtype, config.intermediate_size)
        # What a post-norm reads before it is added.
        returned = self._buffer(DType.F32, config.hidden_size) if config.post_norms else x
        angles = {spec: self._angles(spec) for spec in (config.rotary, config.local_rotary)}
        embed = EmbedArgs(table=self._weight(plan.embedding), scale=config.embedding_scale)
        embed.rounds = dtype is DType.BF16
        self._add("embed", embed, x)
        adds = Epilogue.STORE if config.post_norms else Epilogue.ADD
        for index, layer in enumerate(plan.layers):
            group, at = places[index]
            kv = self._kv(layouts[group], blocks, at)
            self._add("norm", self._norm(layer.attention_norm), x, normed)
            self._linear(layer.qkv, Epilogue.STORE, dtype, normed, qkv)
            spec = config.rotary if config.windows[index] is None else config.local_rotary
            self._add("heads", self._heads(layer, spec, kv, group), qkv, queries, angles[spec])
            attention = AttentionArgs(num_heads=config.num_heads, scale=config.attention_scale, kv=kv, group=group)
            attention.soft_cap = config.attention_soft_cap or 0.0
            self._add("attention", attention, queries, attended)
            self._linear(layer.output, adds, DType.F32, attended, returned)
            self._post_norm(layer.attention_post_norm, returned, x)
            self._add("norm", self._norm(layer.mlp_norm), x, normed)
            self._linear(layer.gate_up, GATES[config.activation], dtype, normed, gated)
            self._linear(layer.down, adds, DType.F32, gated, returned)
            self._post_norm(layer.mlp_post_norm, returned, x)
        head = LinearArgs(weight=self._weight(plan.head), epilogue=Epilogue.LOGITS, output_dtype=DType.F32)
        head.soft_cap = config.logits_soft_cap or 0.0
        norm = self._norm(plan.final_norm)
        self._library.call("pdm_program_logits", self._handle, ctypes.byref(norm), ctypes.byref(head), x)

    def _buffer(self, dtype: DType, width: int) -> int:
        return self._library.call("pdm_program_buffer", self._handle, dtype, width)

    def _add(self, name: str, args: ctypes.Structure, *buffers: int) -> None:
        self._library.call(f"pdm_program_{name}", self._handle, ctypes.byref(args), *buffers)

    def _angles(self, spec: RotarySpec) -> int:
        frequencies = inverse_frequencies(spec)
        self._kept.append(frequencies)
        return self._library.call(
            "pdm_program_angles", self._handle, frequencies.ctypes.data, spec.head_dim, spec.attention_factor
        )

    def _norm(self, gain: Gain) -> NormArgs:
        return NormArgs(
            width=gain.size,
            gain=self._vector(gain.name),
            epsilon=self._config.rms_norm_eps,
            input_dtype=DType.F32,
            output_dtype=self._dtype,
        )

    def _post_norm(self, gain: Gain | None, source: int, target: int) -> None:
        if gain is not None:
            args = self._norm(gain)
            args.adds, args.output_dtype = 1, DType.F32
            self._add("norm", args, source, target)

    def _linear(self, projection: Projection, epilogue: Epilogue, dtype: DType, source: int, target: int) -> None:
        args = LinearArgs(weight=self._weight(projection), epilogue=epilogue, output_dtype=dtype)
        if projection.has_bias:
            args.bias = self._vector(f"{projection.name}.bias")
        self._add("linear", args, source, target)

    def _heads(self, layer: LayerPlan, spec: RotarySpec, kv: Any, group: int) -> HeadsArgs:
        args = HeadsArgs(qkv_dtype=self._dtype, num_heads=self._config.num_heads, kv=kv, group=group)
        args.epsilon, args.rotary_dim, args.rotary_factor = self._config.rms_norm_eps, spec.head_dim, 1.0
        if layer.q_norm is not None and layer.k_norm is not None:
            args.q_gain, args.k_gain = self._vector(layer.q_norm.name), self._vector(layer.k_norm.name)
        return args

    def _kv(self, layout: KVLayout, blocks: NDArray[np.uint8], place: int) -> Any:
        packed = layout.cpu_layout()
        kv = KV(
            blocks=blocks.ctypes.data,
            block_bytes=blocks.shape[1],
            layer_offset=place * packed.layer_bytes,
            head_bytes=packed.head_bytes,
            num_blocks=blocks.shape[0],
            block_size=layout.block_size,
            num_kv_heads=layout.num_kv_heads,
            head_dim=layout.head_dim,
            dtype=self._kv_dtype,
            window=layout.window or 0,
        )
        self._kept.append(kv)
        return ctypes.pointer(kv)

    def _weight(self, projection: Projection) -> Any:
        weight = self._weights.weights[projection.name]
        structure: Weight = weight.structure(int8_rows=self._has_int8_rows and weight.format.has_four_bits)
        self._kept.append(structure)
        return ctypes.pointer(structure)

    def _vector(self, name: str) -> int:
        vector = self._weights.vectors[name]
        self._kept.append(vector)
        return vector.ctypes.data
