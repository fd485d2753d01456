"""The angle per position of each rotary frequency, for every kind of context extension that is supported. Imports no torch.

Sources: position interpolation (arXiv 2306.15595), YaRN (arXiv 2309.00071), Llama 3.1's model card for `llama3`, llama.cpp's
`rope_freqs` tensor for `freq_factors`.
"""

import math
from dataclasses import dataclass
from enum import Enum

import numpy as np
from numpy.typing import NDArray


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


def inverse_frequencies(spec: RotarySpec) -> NDArray[np.float32]:
    """Return radians per position, float32 [head_dim / 2], before the attention factor."""
    exponents = np.arange(0, spec.head_dim, 2, dtype=np.float32) / np.float32(spec.head_dim)
    # Powers of float32 differ between machines in the last bit, and positions in the thousands multiply that.
    base = np.float32(1) / np.power(spec.theta, exponents.astype(np.float64)).astype(np.float32)
    match spec.scaling:
        case RotaryScaling.DEFAULT | RotaryScaling.DYNAMIC:
            return base
        case RotaryScaling.LINEAR:
            return base / np.float32(spec.factor)
        case RotaryScaling.LLAMA3:
            return _llama3(base, spec)
        case RotaryScaling.YARN:
            return _yarn(base, spec)
        case RotaryScaling.FREQ_FACTORS:
            factors: NDArray[np.float32] = np.array(spec.factors, dtype=np.float32)
            return base / factors


def _llama3(base: NDArray[np.float32], spec: RotarySpec) -> NDArray[np.float32]:
    # Share of a frequency that stays unscaled: 1 for those that turn often within the original context, 0 for the slow ones.
    turns = spec.original_max_positions * base / np.float32(2 * math.pi)
    kept = np.clip((turns - spec.low_freq_factor) / (spec.high_freq_factor - spec.low_freq_factor), 0, 1)
    scaled: NDArray[np.float32] = (1 - kept) * base / spec.factor + kept * base
    return scaled


def _yarn(base: NDArray[np.float32], spec: RotarySpec) -> NDArray[np.float32]:
    def dimension_of(num_turns: float) -> float:
        ratio = spec.original_max_positions / (num_turns * 2 * math.pi)
        return spec.head_dim * math.log(ratio) / (2 * math.log(spec.theta))

    low, high = dimension_of(spec.beta_fast), dimension_of(spec.beta_slow)
    if spec.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, spec.head_dim - 1)
    # Equal ends would divide by zero; the ramp is then a step.
    width = high - low if high != low else 0.001
    interpolated = np.clip((np.arange(spec.head_dim // 2, dtype=np.float32) - low) / width, 0, 1)
    scaled: NDArray[np.float32] = interpolated * base / spec.factor + (1 - interpolated) * base
    return scaled
