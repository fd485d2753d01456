"""Rotary position embedding as a model's configuration asks for it."""

import math
from typing import Any

from pdmesh.errors import ConfigError
from pdmesh_kernels.rotary_frequencies import RotaryScaling, RotarySpec


def parse_rotary(theta: float, scaling: dict[str, Any] | None, config: dict[str, Any], model: str) -> RotarySpec:
    """Return what `scaling` (with `rope_type`; None: plain) makes of `theta`, in a model of this configuration.

    Raises ConfigError, naming `model`, for a kind that is not supported or lacks a number.
    """
    rope = scaling or {}
    partial = rope.get("partial_rotary_factor") or config.get("partial_rotary_factor") or 1.0
    if partial != 1.0:
        raise ConfigError(f"{model}: partial_rotary_factor {partial} is not supported; supported: 1.0")
    name = rope.get("rope_type", RotaryScaling.DEFAULT.value)
    try:
        kind = RotaryScaling(name)
    except ValueError as exc:
        supported = ", ".join(kind.value for kind in RotaryScaling)
        raise ConfigError(f"{model}: rope type {name!r} is not supported; supported: {supported}") from exc
    fields: dict[str, Any] = {"head_dim": config["head_dim"], "theta": theta, "scaling": kind}
    try:
        fields |= _scaling_fields(kind, rope, config)
    except KeyError as exc:
        raise ConfigError(f"{model}: rope type {name!r} needs {exc} in the model's rope_scaling") from exc
    return RotarySpec(**fields)


def _scaling_fields(scaling: RotaryScaling, rope: dict[str, Any], config: dict[str, Any]) -> dict[str, Any]:
    match scaling:
        case RotaryScaling.DEFAULT | RotaryScaling.DYNAMIC:
            return {}
        case RotaryScaling.LINEAR:
            return {"factor": float(rope["factor"])}
        case RotaryScaling.FREQ_FACTORS:
            return {"factors": tuple(rope["factors"])}
        case RotaryScaling.LLAMA3:
            return {
                "factor": float(rope["factor"]),
                "low_freq_factor": float(rope["low_freq_factor"]),
                "high_freq_factor": float(rope["high_freq_factor"]),
                "original_max_positions": int(rope["original_max_position_embeddings"]),
            }
        case RotaryScaling.YARN:
            original = int(rope.get("original_max_position_embeddings") or config["max_position_embeddings"])
            factor = float(rope.get("factor") or config["max_position_embeddings"] / original)
            return {
                "factor": factor,
                "original_max_positions": original,
                "beta_fast": float(rope.get("beta_fast") or 32.0),
                "beta_slow": float(rope.get("beta_slow") or 1.0),
                "truncate": bool(rope.get("truncate", True)),
                "attention_factor": _yarn_attention_factor(rope, factor),
            }


def _yarn_attention_factor(rope: dict[str, Any], factor: float) -> float:
    def magnitude(weight: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0

    given = rope.get("attention_factor")
    if given is not None:
        return float(given)
    if rope.get("mscale") and rope.get("mscale_all_dim"):
        return magnitude(rope["mscale"]) / magnitude(rope["mscale_all_dim"])
    return magnitude(1.0)
