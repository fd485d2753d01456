"""Quantised tensors as codes, and projections in the CPU library's formats: whatever the checkpoint, its numbers stay its own."""

import json
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from pdmesh.errors import ConfigError
from pdmesh.models.checkpoint import open_weights
from pdmesh.models.ggml_types import GGMLType
from pdmesh.models.gguf_codes import KINDS, codes_of
from pdmesh.models.gguf_metadata import read_gguf_metadata
from pdmesh.models.gguf_weights import GGUFWeights
from pdmesh.models.quantised_tensor import QuantisedKind, QuantisedTensor
from pdmesh.models.registry import parse_model_config
from pdmesh.models.safetensors_weights import SafetensorsWeights
from pdmesh.models.source import read_config, resolve
from pdmesh.models.weight_formats import FormatChoice, Quantization, choose_format, pack_projection, why_expanded
from pdmesh.models.weight_plan import Projection
from pdmesh.models.weights import TensorRegion, WeightReader
from pdmesh_kernels.cpu.abi import Format
from pdmesh_kernels.cpu.library import Library, load
from pdmesh_kernels.cpu.packing import unpack_row
from support.tiny_gguf import make_tiny_gguf
from support.tiny_models import make_tiny

NUM_HEADS, NUM_KV_HEADS = 4, 2


@pytest.fixture(scope="module")
def library() -> Library:
    return load()


class CodesReader(WeightReader):
    """Holds tensors of any kind, without a file."""

    def __init__(self, tensors: dict[str, QuantisedTensor | torch.Tensor]) -> None:
        self._tensors = tensors
        self.regions = {name: TensorRegion(name, "", tuple(self._values(name).shape), Path(), 0, 0) for name in tensors}

    def read(self, name: str, target: torch.Tensor) -> None:
        target.copy_(self._values(name))

    def quantised_kind(self, name: str) -> QuantisedKind | None:
        tensor = self._tensors[name]
        return tensor.kind if isinstance(tensor, QuantisedTensor) else None

    def read_quantised(self, name: str) -> QuantisedTensor:
        tensor = self._tensors[name]
        assert isinstance(tensor, QuantisedTensor)
        return tensor

    def close(self) -> None:
        pass

    def _values(self, name: str) -> torch.Tensor:
        tensor = self._tensors[name]
        return torch.from_numpy(tensor.dequantised()) if isinstance(tensor, QuantisedTensor) else tensor


def made(kind: QuantisedKind, num_outputs: int, num_inputs: int = 128) -> QuantisedTensor:
    random = np.random.default_rng(num_outputs)
    shape = (num_outputs, num_inputs // kind.group)
    scales = random.uniform(0.01, 0.02, shape).astype(np.float32)
    offsets = random.standard_normal(shape).astype(np.float32)
    if kind.is_half:
        scales, offsets = scales.astype(np.float16).astype(np.float32), offsets.astype(np.float16).astype(np.float32)
    if kind.is_symmetric:
        offsets = scales * np.float32(-(1 << (kind.bits - 1)))
    codes = random.integers(0, 1 << kind.bits, (num_outputs, num_inputs), dtype=np.uint8)
    return QuantisedTensor(kind, codes, scales, offsets)


def rows_of(
    library: Library, reader: WeightReader, projection: Projection, choice: FormatChoice
) -> NDArray[np.float32]:
    weight = pack_projection(library, reader, projection, choice)
    return np.stack([unpack_row(library, weight, row) for row in range(projection.num_outputs)])


def plain_rows(reader: WeightReader, projection: Projection) -> NDArray[np.float32]:
    """The checkpoint's numbers in bf16, as the PyTorch path has them."""
    target = torch.empty(projection.num_outputs, projection.num_inputs, dtype=torch.bfloat16)
    for name, rows in zip(projection.parts, torch.split(target, list(projection.parts.values())), strict=True):
        reader.read(f"{name}.weight", rows)
    return target.float().numpy()


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_codes_mean_what_gguf_says(kind: GGMLType) -> None:
    num_outputs, num_inputs = 6, 512
    gguf_kind = gguf.GGMLQuantizationType(kind)
    if kind is GGMLType.Q4_K:
        # gguf writes none. Any bytes are a block; its two float16 are the first four.
        blocks = np.random.default_rng(0).integers(0, 256, (num_outputs, num_inputs // 256, 144), dtype=np.uint8)
        factors = np.random.default_rng(1).uniform(0.001, 0.01, (*blocks.shape[:2], 2)).astype(np.float16)
        blocks[:, :, :4] = factors.view(np.uint8)
        raw = blocks.reshape(num_outputs, -1)
    else:
        raw = gguf.quants.quantize(
            np.random.default_rng(0).standard_normal((num_outputs, num_inputs), dtype=np.float32), gguf_kind
        )
    tensor = codes_of(raw.view(np.uint8).reshape(-1), kind, num_outputs, num_inputs)
    np.testing.assert_array_equal(tensor.dequantised(), gguf.quants.dequantize(raw, gguf_kind))
    halves = [values.astype(np.float16).astype(np.float32) for values in (tensor.scales, tensor.offsets)]
    is_half = all(map(np.array_equal, halves, (tensor.scales, tensor.offsets)))
    assert is_half == tensor.kind.is_half
    if tensor.kind.is_symmetric:
        np.testing.assert_array_equal(tensor.offsets, -tensor.scales * (1 << (tensor.kind.bits - 1)))


@pytest.mark.parametrize(
    "kind", [GGMLType.Q4_0, GGMLType.Q4_1, GGMLType.Q8_0, GGMLType.Q5_0], ids=lambda kind: kind.name
)
def test_a_gguf_file_is_packed_as_it_is(library: Library, kind: GGMLType, tmp_path: Path) -> None:
    checkpoint = make_tiny("llama_tied", tmp_path / "checkpoint")
    path = make_tiny_gguf(checkpoint, tmp_path / "model.gguf", kind=kind)
    reader = GGUFWeights(read_gguf_metadata(path), NUM_HEADS, NUM_KV_HEADS)
    at = "model.layers.1"
    heads = {f"{at}.self_attn.q_proj": 64, f"{at}.self_attn.k_proj": 32, f"{at}.self_attn.v_proj": 32}
    halves = {f"{at}.mlp.gate_proj": 160, f"{at}.mlp.up_proj": 160}
    table = {"model.embed_tokens": reader.regions["model.embed_tokens.weight"].shape[0]}
    wanted = {GGMLType.Q4_0: Format.Q4, GGMLType.Q4_1: Format.Q4, GGMLType.Q8_0: Format.Q8}.get(kind, Format.BF16)
    try:
        for projection in (
            Projection("qkv", heads, 64),
            Projection("gate_up", halves, 64, is_gated=True),
            Projection("embedding", table, 64),
        ):
            choice = choose_format(
                reader, projection, "bfloat16", Quantization.NONE, is_table=projection.name == "embedding"
            )
            assert choice == FormatChoice(wanted, 0 if wanted is Format.BF16 else 32)
            assert why_expanded(reader, projection, choice) == ("type Q5_0" if wanted is Format.BF16 else "")
            np.testing.assert_array_equal(
                rows_of(library, reader, projection, choice), plain_rows(reader, projection), err_msg=projection.name
            )
    finally:
        reader.close()


FOUR_HALF = QuantisedKind(4, 32, is_half=True, is_symmetric=False)
FOUR_WIDE = QuantisedKind(4, 32, is_half=False, is_symmetric=False)
FOUR_SYMMETRIC = QuantisedKind(4, 32, is_half=True, is_symmetric=True)
EIGHT = QuantisedKind(8, 32, is_half=True, is_symmetric=True)
FOUR_BY_128 = QuantisedKind(4, 128, is_half=False, is_symmetric=False)


@pytest.mark.parametrize(
    ("kinds", "wanted"),
    [
        ((FOUR_HALF, FOUR_SYMMETRIC), FormatChoice(Format.Q4, 32)),
        ((FOUR_HALF, FOUR_WIDE), FormatChoice(Format.Q4_WIDE, 32)),
        ((FOUR_BY_128, FOUR_BY_128), FormatChoice(Format.Q4_WIDE, 128)),
        ((FOUR_SYMMETRIC, EIGHT), FormatChoice(Format.Q8, 32)),
        # Eight bits have no offsets; one group has another's size; one part is of plain numbers.
        ((FOUR_HALF, EIGHT), FormatChoice(Format.BF16, 0)),
        ((FOUR_WIDE, FOUR_BY_128), FormatChoice(Format.BF16, 0)),
        ((FOUR_HALF, None), FormatChoice(Format.BF16, 0)),
    ],
    ids=str,
)
def test_a_fused_projection_loses_nothing(
    library: Library, kinds: tuple[QuantisedKind | None, ...], wanted: FormatChoice
) -> None:
    sizes = (40, 33)
    tensors = {
        f"part{index}.weight": torch.randn(size, 128) if kind is None else made(kind, size)
        for index, (kind, size) in enumerate(zip(kinds, sizes, strict=True))
    }
    reader = CodesReader(tensors)
    projection = Projection("fused", {"part0": sizes[0], "part1": sizes[1]}, 128)
    choice = choose_format(reader, projection, "bfloat16", Quantization.NONE, is_table=False)
    assert choice == wanted
    is_expanded = wanted.format is Format.BF16 and any(kinds)
    assert why_expanded(reader, projection, choice) == ("parts in different formats" if is_expanded else "")
    np.testing.assert_array_equal(rows_of(library, reader, projection, choice), plain_rows(reader, projection))


def test_online_formats(library: Library) -> None:
    values = torch.randn(40, 100) / 30
    reader = CodesReader({"part.weight": values, "own.weight": made(FOUR_HALF, 40)})
    projection = Projection("linear", {"part": 40}, 100)
    own = Projection("own", {"own": 40}, 128)
    for quantization, format, most in (
        (Quantization.INT8, Format.I8, 0.01),
        (Quantization.INT8_WEIGHT_ONLY, Format.Q8, 0.01),
    ):
        choice = choose_format(reader, projection, "bfloat16", quantization, is_table=False)
        assert choice.format is format
        found = rows_of(library, reader, projection, choice)
        assert not np.array_equal(found, values.bfloat16().float().numpy())
        assert np.linalg.norm(found - values.numpy()) / np.linalg.norm(values) < most
        # What the checkpoint has quantised stays as it is; tables are for tokens in and out.
        assert choose_format(reader, own, "bfloat16", quantization, is_table=False).format is Format.Q4
        assert choose_format(reader, projection, "bfloat16", quantization, is_table=True).format is Format.BF16
        with pytest.raises(ConfigError, match=f"{quantization.value} needs --dtype bfloat16, not float32"):
            choose_format(reader, projection, "float32", quantization, is_table=False)
    plain = choose_format(reader, projection, "float32", Quantization.NONE, is_table=False)
    assert plain == FormatChoice(Format.F32, 0)
    np.testing.assert_array_equal(rows_of(library, reader, projection, plain), values.numpy())
    assert choose_format(reader, own, "float32", Quantization.NONE, is_table=False) == FormatChoice(Format.F32, 0)


def test_weights_that_a_format_cannot_hold_are_named(library: Library) -> None:
    reader = CodesReader({"part.weight": torch.full((40, 64), torch.inf)})
    projection = Projection("layers.3.down", {"part": 40}, 64)
    choice = choose_format(reader, projection, "bfloat16", Quantization.INT8, is_table=False)
    with pytest.raises(ConfigError, match=r"layers\.3\.down: its weights cannot be kept as I8: .*not finite"):
        pack_projection(library, reader, projection, choice)


def test_a_checkpoint_that_is_not_quantised_has_no_kinds(tmp_path: Path) -> None:
    folder = make_tiny("llama_tied", tmp_path / "checkpoint")
    source = resolve(str(folder))
    reader = open_weights(source, parse_model_config(read_config(source), str(folder)), None)
    try:
        assert isinstance(reader, SafetensorsWeights)
        assert not json.loads((folder / "config.json").read_text()).get("quantization_config")
        assert all(reader.quantised_kind(name) is None for name in reader.regions)
    finally:
        reader.close()
