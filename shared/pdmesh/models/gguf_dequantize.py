"""Quantised ggml blocks to floats, in torch where it is simple and common, else by `gguf`.

In torch because start-up waits for it: SmolLM2's 135 M weights took 1.6 s in `gguf.quants` and take 0.3 s here.
Block formats: ggml-quants in ggml's sources; all little-endian, 32 items per block.
"""

from collections.abc import Callable

import gguf.quants
import torch
from gguf.constants import GGMLQuantizationType

from pdmesh.models.ggml_types import GGMLType

PLAIN_DTYPES = {
    GGMLType.F32: torch.float32,
    GGMLType.F16: torch.float16,
    GGMLType.BF16: torch.bfloat16,
}
BLOCK_ITEMS = 32
# Blocks converted at a time, so that intermediate results (1 MiB of float32) stay in the cache.
CHUNK_BLOCKS = 8192


def dequantize(raw: torch.Tensor, kind: GGMLType, target: torch.Tensor) -> None:
    """Fill `target` (contiguous, float) from `raw` (uint8, flat, as in the file).

    Raises NotImplementedError for a type that neither we nor `gguf` can convert.
    """
    if kind in PLAIN_DTYPES:
        target.view(-1).copy_(raw.view(PLAIN_DTYPES[kind]))
        return
    if kind not in BLOCK_FORMATS:
        rows = raw.numpy().reshape(*target.shape[:-1], -1)
        target.copy_(torch.from_numpy(gguf.quants.dequantize(rows, GGMLQuantizationType(kind))))
        return
    block_bytes, convert = BLOCK_FORMATS[kind]
    blocks = raw.view(-1, block_bytes)
    items = target.view(-1, BLOCK_ITEMS)
    for start in range(0, blocks.shape[0], CHUNK_BLOCKS):
        chunk = slice(start, start + CHUNK_BLOCKS)
        items[chunk] = convert(blocks[chunk])


def _scale(blocks: torch.Tensor, offset: int) -> torch.Tensor:
    return blocks[:, offset : offset + 2].view(torch.float16).float()


def _nibbles(packed: torch.Tensor) -> torch.Tensor:
    """The low four bits of all bytes are a block's first half, the high ones its second."""
    return torch.cat((packed & 15, packed >> 4), dim=1).float()


def _q4_0(blocks: torch.Tensor) -> torch.Tensor:
    return (_nibbles(blocks[:, 2:]) - 8).mul_(_scale(blocks, 0))


def _q4_1(blocks: torch.Tensor) -> torch.Tensor:
    return _nibbles(blocks[:, 4:]).mul_(_scale(blocks, 0)).add_(_scale(blocks, 2))


def _q8_0(blocks: torch.Tensor) -> torch.Tensor:
    return blocks[:, 2:].view(torch.int8).float().mul_(_scale(blocks, 0))


BLOCK_FORMATS: dict[GGMLType, tuple[int, Callable[[torch.Tensor], torch.Tensor]]] = {
    GGMLType.Q4_0: (18, _q4_0),
    GGMLType.Q4_1: (20, _q4_1),
    GGMLType.Q8_0: (34, _q8_0),
}
"""Bytes per block, and blocks -> float32 [blocks, 32]."""
