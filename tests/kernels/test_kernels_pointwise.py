"""rms_norm, the gates and rotary against their definitions, and what their wrappers refuse."""

from collections.abc import Callable

import pytest
import torch

from pdmesh_kernels.checks import KernelArgumentError
from pdmesh_kernels.gelu_mul import gelu_mul, gelu_mul_reference
from pdmesh_kernels.rms_norm import rms_norm, rms_norm_reference
from pdmesh_kernels.rotary import rotary, rotary_reference
from pdmesh_kernels.rotary_frequencies import RotaryScaling, RotarySpec, inverse_frequencies
from pdmesh_kernels.silu_mul import silu_mul, silu_mul_reference

Gate = Callable[[torch.Tensor], torch.Tensor]
SIZES = [1, 15, 31, 33, 63]
# Error allowed relative to the answer's size: a few units in the last place of each dtype.
TOLERANCE = {torch.float32: 1e-6, torch.bfloat16: 1e-2, torch.float16: 2e-3}


def close(found: torch.Tensor, wanted: torch.Tensor) -> bool:
    error = (found.double() - wanted.double()).abs().max()
    return bool(error <= TOLERANCE[wanted.dtype] * wanted.double().abs().max())


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("num_tokens", SIZES)
def test_rms_norm_equals_reference(num_tokens: int, dtype: torch.dtype) -> None:
    x = torch.randn(num_tokens, 65).to(dtype)
    weight = torch.randn(65).to(dtype)
    assert close(rms_norm(x, weight, 1e-5), rms_norm_reference(x, weight, 1e-5))


def test_rms_norm_takes_strided_heads() -> None:
    fused = torch.randn(7, 5, 32)
    heads, weight = fused[:, 1:3], torch.randn(32)
    assert close(rms_norm(heads, weight, 1e-6), rms_norm_reference(heads, weight, 1e-6))


@pytest.mark.parametrize("num_tokens", SIZES)
def test_rms_norm_rounds_once_with_a_wide_gain(num_tokens: int) -> None:
    x, weight = torch.randn(num_tokens, 65).bfloat16(), 1 + torch.randn(65) / 1000
    wanted = (x.float() / (x.float().square().mean(dim=-1, keepdim=True) + 1e-5).sqrt() * weight).bfloat16()
    found = rms_norm(x, weight, 1e-5)
    assert found.dtype == torch.bfloat16
    assert (found != wanted).float().mean() < 0.01
    assert close(found, wanted)


@pytest.mark.parametrize(
    ("operation", "reference"), [(silu_mul, silu_mul_reference), (gelu_mul, gelu_mul_reference)], ids=["silu", "gelu"]
)
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("num_tokens", SIZES)
def test_gates_equal_reference(operation: Gate, reference: Gate, num_tokens: int, dtype: torch.dtype) -> None:
    gate_up = (torch.randn(num_tokens, 2 * 33) * 4).to(dtype)
    kept = gate_up.clone()
    assert close(operation(gate_up), reference(gate_up))
    assert torch.equal(gate_up, kept)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("num_tokens", SIZES)
def test_rotary_equals_complex_rotation(num_tokens: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    poison_empty(monkeypatch)
    fused = torch.randn(num_tokens, 9, 16).to(dtype)
    heads = fused[:, 2:7]
    frequencies = torch.from_numpy(inverse_frequencies(RotarySpec(head_dim=16, theta=1e4)))
    angles = torch.outer(torch.arange(num_tokens).float() * 37, frequencies)
    cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)
    assert close(rotary(heads, cos, sin), rotary_reference(heads, cos, sin))


def test_rotary_turns_a_pair_by_its_angle() -> None:
    turned = rotary(torch.tensor([[[1.0, 0.0]]]), torch.tensor([[0.0]]), torch.tensor([[1.0]]))
    assert turned.tolist() == [[[0.0, 1.0]]]


def test_default_frequencies_fall_from_one_to_near_inverse_theta() -> None:
    found = inverse_frequencies(RotarySpec(head_dim=4, theta=100.0))
    assert found.tolist() == pytest.approx([1.0, 0.1])


def test_freq_factors_divide() -> None:
    spec = RotarySpec(head_dim=4, theta=100.0, scaling=RotaryScaling.FREQ_FACTORS, factors=(1.0, 8.0))
    assert inverse_frequencies(spec).tolist() == pytest.approx([1.0, 0.0125])


def test_wrong_arguments_are_named() -> None:
    x = torch.randn(3, 8)
    with pytest.raises(KernelArgumentError, match=r"weight must be \[8\]"):
        rms_norm(x, torch.ones(7), 1e-5)
    with pytest.raises(KernelArgumentError, match=r"weight is torch\.float16"):
        rms_norm(x, torch.ones(8, dtype=torch.float16), 1e-5)
    with pytest.raises(KernelArgumentError, match="even width"):
        silu_mul(torch.randn(3, 7))
    with pytest.raises(KernelArgumentError, match="gelu_mul: gate_up must have an even width"):
        gelu_mul(torch.randn(3, 7))
    with pytest.raises(KernelArgumentError, match="must be float32"):
        silu_mul(torch.ones(3, 8, dtype=torch.int64))
    with pytest.raises(KernelArgumentError, match="contiguous in its last"):
        silu_mul(torch.randn(8, 4).t())
    with pytest.raises(KernelArgumentError, match=r"cos must be \[3, 4\]"):
        rotary(torch.randn(3, 2, 8), torch.randn(2, 4), torch.randn(3, 4))
    with pytest.raises(KernelArgumentError, match="head_dim must be even"):
        rotary(torch.randn(3, 2, 7), torch.randn(3, 3), torch.randn(3, 3))


def poison_empty(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make torch.empty hand out NaN, so that an element nobody writes shows."""
    real_empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *args, **kwargs: real_empty(*args, **kwargs).fill_(torch.nan))
