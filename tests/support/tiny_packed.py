"""Tiny AWQ and GPTQ checkpoints, written word by word from the formats' definitions, beside what they mean in plain numbers."""

import json
import shutil
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import load_file, save_file

Layout = Literal["awq", "gptq", "gptq_v2"]
AWQ_PLACE_OF_OUTPUT = (0, 4, 1, 5, 2, 6, 3, 7)
"""In which nibble of its word AWQ puts each of eight neighbouring outputs."""


def make_tiny_packed(
    checkpoint: Path,
    folder: Path,
    layout: Layout,
    *,
    bits: int = 4,
    group: int = 32,
    is_symmetric: bool = False,
    is_act_order: bool = False,
) -> tuple[Path, Path]:
    """Quantise the layers of a `make_tiny` checkpoint; return the packed one and one of the same numbers in float32.

    group -1: one for all inputs. A bias of zeros is added to one projection, as GPTQ's tools do.
    """
    packed, plain = folder / "packed", folder / "plain"
    for target in (packed, plain):
        shutil.copytree(checkpoint, target)
    stored: dict[str, NDArray[np.generic]] = {}
    meant: dict[str, NDArray[np.generic]] = {}
    random = np.random.default_rng(0)
    for name, weight in load_file(checkpoint / "model.safetensors").items():
        if "_proj.weight" not in name:
            stored[name] = meant[name] = weight
            continue
        stem = name.removesuffix(".weight")
        num_outputs, num_inputs = weight.shape
        group_inputs = num_inputs if group == -1 else group
        index = np.arange(num_inputs) // group_inputs
        if is_act_order:
            random.shuffle(index)
        codes, scales, zeros = _quantise(weight, index, bits, is_symmetric)
        meant[name] = ((codes.astype(np.float32) - zeros[:, index]) * scales.astype(np.float32)[:, index]).astype(
            np.float32
        )
        if layout == "awq":
            stored[f"{stem}.qweight"] = _pack_outputs(codes.T, AWQ_PLACE_OF_OUTPUT, bits)
            stored[f"{stem}.qzeros"] = _pack_outputs(zeros.T, AWQ_PLACE_OF_OUTPUT, bits)
        else:
            stored[f"{stem}.qweight"] = _pack_outputs(codes, range(32 // bits), bits).T.copy()
            stored_zeros = zeros - (1 if layout == "gptq" else 0)
            stored[f"{stem}.qzeros"] = _pack_outputs(stored_zeros.T, range(32 // bits), bits)
            stored[f"{stem}.g_idx"] = index.astype(np.int32)
        stored[f"{stem}.scales"] = np.ascontiguousarray(scales.T)
    if layout != "awq" and "model.layers.0.mlp.down_proj.bias" not in stored:
        stored["model.layers.0.mlp.down_proj.bias"] = np.zeros(num_outputs, dtype=np.float16)
    save_file(stored, packed / "model.safetensors")
    save_file(meant, plain / "model.safetensors")
    config = json.loads((packed / "config.json").read_text())
    config["quantization_config"] = {"bits": bits, "group_size": group} | (
        {"quant_method": "awq", "version": "gemm", "zero_point": True}
        if layout == "awq"
        else {"quant_method": "gptq", "checkpoint_format": layout, "desc_act": is_act_order, "sym": is_symmetric}
    )
    (packed / "config.json").write_text(json.dumps(config))
    return packed, plain


def _quantise(
    weight: NDArray[np.float32], index: NDArray[np.intp], bits: int, is_symmetric: bool
) -> tuple[NDArray[np.uint8], NDArray[np.float16], NDArray[np.int64]]:
    """Codes [n, K]; scales and zero points [n, groups]; `index`: the group of each input."""
    most = (1 << bits) - 1
    shape = (weight.shape[0], int(index.max()) + 1)
    scales, zeros = np.empty(shape, dtype=np.float16), np.empty(shape, dtype=np.int64)
    codes = np.empty(weight.shape, dtype=np.uint8)
    for group in range(shape[1]):
        part = weight[:, index == group]
        if is_symmetric:
            scales[:, group] = 2 * np.abs(part).max(axis=1) / most
            zeros[:, group] = (most + 1) // 2
        else:
            low, high = np.minimum(part.min(axis=1), 0), np.maximum(part.max(axis=1), 0)
            scales[:, group] = (high - low) / most
            # A stored zero point of GPTQ's first version is one less, and none is below 0.
            zeros[:, group] = np.clip(np.round(-low / scales[:, group]), 1, most)
        exact = scales[:, group, None].astype(np.float32)
        codes[:, index == group] = np.clip(np.round(part / exact) + zeros[:, group, None], 0, most)
    return codes, scales, zeros


def _pack_outputs(values: NDArray[np.integer], places: tuple[int, ...] | range, bits: int) -> NDArray[np.int32]:
    """Put each row's neighbours, as many as fit, into one word; `places`: where in it each of them goes."""
    rows, per_word = values.shape[0], 32 // bits
    words = np.zeros((rows, values.shape[1] // per_word), dtype=np.uint32)
    for position, place in enumerate(places):
        words |= values[:, position::per_word].astype(np.uint32) << np.uint32(bits * place)
    return words.view(np.int32)
