"""The C interface's structures and functions for ctypes: `src/pdmesh_cpu.h`, line by line."""

import ctypes
from ctypes import POINTER, c_char_p, c_float, c_int, c_int32, c_int64, c_size_t, c_void_p
from enum import IntEnum
from typing import Any, ClassVar

ABI_VERSION = 1
PANEL = 32


class Isa(IntEnum):
    AVX2 = 0
    AVX512 = 1
    AVX512_BF16 = 2
    AMX = 3


class DType(IntEnum):
    F32 = 0
    BF16 = 1
    I8 = 2


class Format(IntEnum):
    """Of weights."""

    F32 = 0
    BF16 = 1
    I8 = 2
    Q8 = 3
    Q4 = 4
    Q4_WIDE = 5

    @property
    def has_four_bits(self) -> bool:
        """Whether rows may be quantised to 8 bits for it."""
        return self in (Format.Q4, Format.Q4_WIDE)


class Epilogue(IntEnum):
    STORE = 0
    ADD = 1
    SILU_MUL = 2
    GELU_MUL = 3
    LOGITS = 4


class Weight(ctypes.Structure):
    _fields_: ClassVar[list[tuple[str, Any]]] = [
        ("format", c_int32),
        ("num_outputs", c_int32),
        ("num_inputs", c_int32),
        ("group", c_int32),
        ("is_gated", c_int32),
        ("int8_rows", c_int32),
        ("panel_bytes", c_size_t),
        ("panels", c_void_p),
    ]


class LinearArgs(ctypes.Structure):
    _fields_: ClassVar[list[tuple[str, Any]]] = [
        ("weight", POINTER(Weight)),
        ("input", c_void_p),
        ("input_stride", c_size_t),
        ("num_rows", c_int32),
        ("epilogue", c_int32),
        ("bias", c_void_p),
        ("output", c_void_p),
        ("output_stride", c_size_t),
        ("output_dtype", c_int32),
        ("soft_cap", c_float),
        ("best_value", c_void_p),
        ("best_id", c_void_p),
        ("scratch", c_void_p),
    ]


class NormArgs(ctypes.Structure):
    _fields_: ClassVar[list[tuple[str, Any]]] = [
        ("input", c_void_p),
        ("input_stride", c_size_t),
        ("num_rows", c_int32),
        ("width", c_int32),
        ("gain", c_void_p),
        ("bias", c_void_p),
        ("epsilon", c_float),
        ("is_layer_norm", c_int32),
        ("adds", c_int32),
        ("input_dtype", c_int32),
        ("output_dtype", c_int32),
        ("output", c_void_p),
        ("output_stride", c_size_t),
        ("row_index", c_void_p),
    ]


class EmbedArgs(ctypes.Structure):
    _fields_: ClassVar[list[tuple[str, Any]]] = [
        ("table", POINTER(Weight)),
        ("token_ids", c_void_p),
        ("num_rows", c_int32),
        ("scale", c_float),
        ("output", c_void_p),
        ("output_stride", c_size_t),
        ("rounds", c_int32),
    ]


class KV(ctypes.Structure):
    _fields_: ClassVar[list[tuple[str, Any]]] = [
        ("blocks", c_void_p),
        ("block_bytes", c_size_t),
        ("layer_offset", c_size_t),
        ("head_bytes", c_size_t),
        ("num_blocks", c_int32),
        ("block_size", c_int32),
        ("num_kv_heads", c_int32),
        ("head_dim", c_int32),
        ("dtype", c_int32),
        ("window", c_int32),
    ]


class Batch(ctypes.Structure):
    _fields_: ClassVar[list[tuple[str, Any]]] = [
        ("num_tokens", c_int32),
        ("num_sequences", c_int32),
        ("table_width", c_int32),
        ("num_groups", c_int32),
        ("token_ids", c_void_p),
        ("positions", c_void_p),
        ("query_start", c_void_p),
        ("context_len", c_void_p),
        ("block_tables", POINTER(c_void_p)),
        ("logits_index", c_void_p),
        ("num_logits", c_int32),
        ("reserved", c_int32),
    ]


class HeadsArgs(ctypes.Structure):
    _fields_: ClassVar[list[tuple[str, Any]]] = [
        ("qkv", c_void_p),
        ("qkv_stride", c_size_t),
        ("qkv_dtype", c_int32),
        ("num_heads", c_int32),
        ("q_gain", c_void_p),
        ("k_gain", c_void_p),
        ("epsilon", c_float),
        ("rotary_dim", c_int32),
        ("frequencies", c_void_p),
        ("rotary_factor", c_float),
        ("is_interleaved", c_int32),
        ("queries", c_void_p),
        ("kv", POINTER(KV)),
        ("group", c_int32),
        ("angles", c_void_p),
    ]


class AttentionArgs(ctypes.Structure):
    _fields_: ClassVar[list[tuple[str, Any]]] = [
        ("queries", c_void_p),
        ("output", c_void_p),
        ("output_stride", c_size_t),
        ("num_heads", c_int32),
        ("scale", c_float),
        ("soft_cap", c_float),
        ("kv", POINTER(KV)),
        ("group", c_int32),
        ("reserved", c_int32),
    ]


FUNCTIONS: dict[str, tuple[Any, list[Any]]] = {
    "pdm_abi_version": (c_int, []),
    "pdm_source_digest": (c_char_p, []),
    "pdm_isa_supported": (c_int, [c_int]),
    "pdm_isa_name": (c_char_p, [c_int]),
    "pdm_last_error": (c_char_p, []),
    "pdm_pool_create": (c_void_p, [c_int, POINTER(c_int)]),
    "pdm_pool_destroy": (None, [c_void_p]),
    "pdm_pool_num_threads": (c_int, [c_void_p]),
    "pdm_panel_bytes": (c_size_t, [c_int, c_int, c_int]),
    "pdm_num_panels": (c_int, [c_int, c_int]),
    "pdm_kv_head_bytes": (c_size_t, [c_int, c_int, c_int]),
    "pdm_linear_scratch_bytes": (c_size_t, [POINTER(Weight), c_int]),
    "pdm_pack": (c_int, [c_int, c_int, c_int, c_int, c_int, c_void_p, c_void_p]),
    "pdm_pack_codes": (c_int, [c_int, c_int, c_int, c_int, c_int, c_void_p, c_void_p, c_void_p, c_void_p]),
    "pdm_unpack_row": (c_int, [POINTER(Weight), c_int, c_void_p]),
    "pdm_linear": (c_int, [c_void_p, c_int, POINTER(LinearArgs)]),
    "pdm_norm": (c_int, [c_void_p, c_int, POINTER(NormArgs)]),
    "pdm_embed": (c_int, [c_void_p, c_int, POINTER(EmbedArgs)]),
    "pdm_heads": (c_int, [c_void_p, c_int, POINTER(HeadsArgs), POINTER(Batch)]),
    "pdm_attention": (c_int, [c_void_p, c_int, POINTER(AttentionArgs), POINTER(Batch)]),
    "pdm_angles": (c_int, [c_void_p, c_void_p, c_int, c_void_p, c_int, c_float, c_void_p]),
    "pdm_program_create": (c_void_p, [c_int]),
    "pdm_program_destroy": (None, [c_void_p]),
    "pdm_program_buffer": (c_int, [c_void_p, c_int, c_int]),
    "pdm_program_angles": (c_int, [c_void_p, c_void_p, c_int, c_float]),
    "pdm_program_embed": (c_int, [c_void_p, POINTER(EmbedArgs), c_int]),
    "pdm_program_norm": (c_int, [c_void_p, POINTER(NormArgs), c_int, c_int]),
    "pdm_program_linear": (c_int, [c_void_p, POINTER(LinearArgs), c_int, c_int]),
    "pdm_program_heads": (c_int, [c_void_p, POINTER(HeadsArgs), c_int, c_int, c_int]),
    "pdm_program_attention": (c_int, [c_void_p, POINTER(AttentionArgs), c_int, c_int]),
    "pdm_program_logits": (c_int, [c_void_p, POINTER(NormArgs), POINTER(LinearArgs), c_int]),
    "pdm_program_bytes": (c_size_t, [c_void_p, c_int, c_int]),
    "pdm_program_run": (c_int, [c_void_p, c_void_p, POINTER(Batch), c_void_p, c_void_p]),
    "pdm_program_times": (None, [c_void_p, POINTER(c_int64)]),
}
"""Name -> result, arguments."""

__all__ = [
    "ABI_VERSION",
    "FUNCTIONS",
    "KV",
    "PANEL",
    "AttentionArgs",
    "Batch",
    "DType",
    "EmbedArgs",
    "Epilogue",
    "Format",
    "HeadsArgs",
    "Isa",
    "LinearArgs",
    "NormArgs",
    "Weight",
]
