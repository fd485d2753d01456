"""The packed inside of a KV block, as the CPU library reads it, to and from the layout that all backends share.

The library's own definition is `pdm_kv` in `src/pdmesh_cpu.h`; here it is in numpy, for exchange with other layouts.
"""

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from pdmesh_kernels.cpu.limits import MAX_HEAD_DIM, TOKEN_TILE

ItemType = Literal["float32", "bfloat16", "int8"]
ITEM_DTYPES: dict[ItemType, type[np.generic]] = {"float32": np.float32, "bfloat16": np.uint16, "int8": np.int8}
"""As numpy holds them: bfloat16 as its bits."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KVItems:
    """Blocks in the shared layout. N blocks, L layers, J KV heads, S tokens, D items of a head."""

    items: NDArray[Any]
    """[N, L, J, 2 (K, V), S, D], dtype as in ITEM_DTYPES."""
    scales: NDArray[np.float32] | None
    """[N, L, J, 2, S], what an int8 item is multiplied by; None for the others."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedLayout:
    """What a block of one KV group looks like inside. The layers come one after the other, each with its KV heads."""

    item_type: ItemType
    num_layers: int
    num_kv_heads: int
    block_size: int
    """Tokens, a multiple of TOKEN_TILE."""
    head_dim: int
    """Even, up to MAX_HEAD_DIM. Heads are padded with zeros to a multiple of 32."""

    def __post_init__(self) -> None:
        if self.item_type not in ITEM_DTYPES:
            raise ValueError(f"item_type {self.item_type!r}: not one of {', '.join(ITEM_DTYPES)}")
        if self.num_layers < 1 or self.num_kv_heads < 1:
            raise ValueError(f"num_layers {self.num_layers} and num_kv_heads {self.num_kv_heads} must be at least 1")
        if self.block_size < TOKEN_TILE or self.block_size % TOKEN_TILE:
            raise ValueError(f"block_size {self.block_size}: not a multiple of {TOKEN_TILE}")
        if not 2 <= self.head_dim <= MAX_HEAD_DIM or self.head_dim % 2:
            raise ValueError(f"head_dim {self.head_dim}: not an even number in 2 ... {MAX_HEAD_DIM}")

    @property
    def padded_dim(self) -> int:
        return -(-self.head_dim // 32) * 32

    @property
    def scale_bytes(self) -> int:
        """Of a head: none, or a float for each key and each value."""
        return 2 * self.block_size * 4 if self.item_type == "int8" else 0

    @property
    def head_bytes(self) -> int:
        """Equal to pdm_kv_head_bytes."""
        return 2 * self.block_size * self.padded_dim * np.dtype(ITEM_DTYPES[self.item_type]).itemsize + self.scale_bytes

    @property
    def layer_bytes(self) -> int:
        return self.num_kv_heads * self.head_bytes

    @property
    def block_bytes(self) -> int:
        """A pool may give a block more; what is behind has no meaning."""
        return self.num_layers * self.layer_bytes

    def unpack(self, blocks: NDArray[np.uint8]) -> KVItems:
        """Return copies of the items in `blocks` [N, at least block_bytes]."""
        _check_blocks(blocks, self.block_bytes)
        heads = _heads(blocks, self)
        size = heads.shape[-1] - self.scale_bytes
        halves = heads[..., :size].reshape(*heads.shape[:3], 2, size // 2).view(ITEM_DTYPES[self.item_type])
        block_size, width = self.block_size, self.padded_dim
        keys, values = halves[..., 0, :], halves[..., 1, :]
        lead = keys.shape[:3]
        if self.item_type == "float32":
            keys = keys.reshape(*lead, block_size // 16, width, 16).swapaxes(-1, -2)
        else:
            keys = keys.reshape(*lead, block_size // 16, width // 2, 16, 2).swapaxes(-2, -3)
            values = values.reshape(*lead, block_size // 2, width, 2).swapaxes(-1, -2)
        items = np.stack([half.reshape(*lead, block_size, width) for half in (keys, values)], axis=3)
        scales = heads[..., size:].copy().view(np.float32).reshape(*lead, 2, block_size) if self.scale_bytes else None
        return KVItems(items=np.ascontiguousarray(items[..., : self.head_dim]), scales=scales)

    def pack(self, source: KVItems, blocks: NDArray[np.uint8]) -> None:
        """Write the items into `blocks` [N, at least block_bytes]. Slots that hold no token yet must be zero."""
        _check_blocks(blocks, self.block_bytes)
        shape = (len(blocks), self.num_layers, self.num_kv_heads, 2, self.block_size)
        dtype = ITEM_DTYPES[self.item_type]
        if source.items.shape != (*shape, self.head_dim) or source.items.dtype != dtype:
            raise ValueError(
                f"items are {source.items.dtype} {source.items.shape}, not {dtype.__name__} {(*shape, self.head_dim)}"
            )
        if (None if source.scales is None else source.scales.shape) != (shape if self.scale_bytes else None):
            raise ValueError(f"scales must be {shape if self.scale_bytes else None} for {self.item_type}")
        padded = np.zeros((*shape, self.padded_dim), dtype)
        padded[..., : self.head_dim] = source.items
        keys, values = padded[..., 0, :, :], padded[..., 1, :, :]
        lead, block_size, width = shape[:3], self.block_size, self.padded_dim
        if self.item_type == "float32":
            keys = keys.reshape(*lead, block_size // 16, 16, width).swapaxes(-1, -2)
        else:
            keys = keys.reshape(*lead, block_size // 16, 16, width // 2, 2).swapaxes(-2, -3)
            values = values.reshape(*lead, block_size // 2, 2, width).swapaxes(-1, -2)
        parts = [np.ascontiguousarray(half).reshape(*lead, -1).view(np.uint8) for half in (keys, values)]
        if source.scales is not None:
            parts.append(np.ascontiguousarray(source.scales, np.float32).reshape(*lead, -1).view(np.uint8))
        blocks[:, : self.block_bytes] = np.concatenate(parts, axis=-1).reshape(len(blocks), -1)


def _check_blocks(blocks: NDArray[np.uint8], block_bytes: int) -> None:
    if blocks.dtype != np.uint8 or blocks.ndim != 2 or blocks.shape[1] < block_bytes:
        raise ValueError(f"blocks are {blocks.dtype} {blocks.shape}, not uint8 [N, {block_bytes} or more]")


def _heads(blocks: NDArray[np.uint8], layout: PackedLayout) -> NDArray[np.uint8]:
    heads = np.ascontiguousarray(blocks[:, : layout.block_bytes])
    return heads.reshape(len(blocks), layout.num_layers, layout.num_kv_heads, layout.head_bytes)
