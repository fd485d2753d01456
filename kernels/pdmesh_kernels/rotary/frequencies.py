"""The angle per position of each rotary frequency, for every kind of context extension that is supported.

Sources: position interpolation (arXiv 2306.15595), YaRN (arXiv 2309.00071), Llama 3.1's model card for `llama3`, llama.cpp's
`rope_freqs` tensor for `freq_factors`.
"""

import math
from dataclasses import dataclass
from enum import Enum

import torch


class RotaryScaling(Enum):
    """Names as in Hugging Face's `rope_type`."""

    DEFAULT = "default"
    LINEAR = "linear"
    DYNAMIC = "dynamic"
    """Changes nothing up to the model's own context, which is as far as pdmesh goes."""
    LLAMA3 = "llama3"
    YARN = "yarn"
    FREQ_FACTORS = "freq_factors"
    """GGUF: a divisor per frequency."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RotarySpec:
    """All that the angles depend on; part of the model's fingerprint."""

    head_dim: int
    theta: float
    scaling: RotaryScaling = RotaryScaling.DEFAULT
    factor: float = 1.0
    original_max_positions: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    attention_factor: float = 1.0
    """Multiplies cos and sin (YaRN)."""
    factors: tuple[float, ...] = ()
    """FREQ_FACTORS: head_dim / 2 divisors."""


def inverse_frequencies(spec: RotarySpec) -> torch.Tensor:
    """Return radians per position, float32 [head_dim / 2], before the attention factor."""
    exponents = torch.arange(0, spec.head_dim, 2, dtype=torch.float32) / spec.head_dim
    base = 1.0 / (spec.theta**exponents)
    match spec.scaling:
        case RotaryScaling.DEFAULT | RotaryScaling.DYNAMIC:
            return base
        case RotaryScaling.LINEAR:
            return base / spec.factor
        case RotaryScaling.LLAMA3:
            return _llama3(base, spec)
        case RotaryScaling.YARN:
            return _yarn(base, spec)
        case RotaryScaling.FREQ_FACTORS:
            return base / torch.tensor(spec.factors, dtype=torch.float32)


def _llama3(base: torch.Tensor, spec: RotarySpec) -> torch.Tensor:
    # Share of a frequency that stays unscaled: 1 for those that turn often within the original context, 0 for the slow ones.
    turns = spec.original_max_positions * base / (2 * math.pi)
    kept = ((turns - spec.low_freq_factor) / (spec.high_freq_factor - spec.low_freq_factor)).clamp(0.0, 1.0)
    return (1 - kept) * base / spec.factor + kept * base


def _yarn(base: torch.Tensor, spec: RotarySpec) -> torch.Tensor:
    def dimension_of(num_turns: float) -> float:
        ratio = spec.original_max_positions / (num_turns * 2 * math.pi)
        return spec.head_dim * math.log(ratio) / (2 * math.log(spec.theta))

    low, high = dimension_of(spec.beta_fast), dimension_of(spec.beta_slow)
    if spec.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, spec.head_dim - 1)
    # Equal ends would divide by zero; the ramp is then a step.
    width = high - low if high != low else 0.001
    interpolated = ((torch.arange(spec.head_dim // 2, dtype=torch.float32) - low) / width).clamp(0.0, 1.0)
    return interpolated * base / spec.factor + (1 - interpolated) * base
