"""Which layers of a model see all tokens and which a sliding window only, as its configuration says."""

from typing import Any

from pdmesh.errors import ConfigError
from pdmesh.models.hf_config import FULL, SLIDING

Windows = tuple[int | None, ...]
"""Per layer; None: full attention."""


def same_window(config: dict[str, Any], model: str) -> Windows:
    """`sliding_window` for all layers, or none (Mistral)."""
    num_layers: int = config["num_hidden_layers"]
    return (_window(config, model),) * num_layers


def windows_of_later_layers(config: dict[str, Any], model: str) -> Windows:
    """`sliding_window` from layer `max_window_layers` on, if `use_sliding_window`, unless `layer_types` is given (Qwen)."""
    num_layers: int = config["num_hidden_layers"]
    if not config.get("use_sliding_window", False):
        return (None,) * num_layers
    first = config.get("max_window_layers", num_layers)
    return _by_types(config, model, [SLIDING if layer >= first else FULL for layer in range(num_layers)])


def windows_by_pattern(config: dict[str, Any], model: str, pattern: int) -> Windows:
    """Every `pattern`-th layer sees all, the others `sliding_window`, unless `layer_types` is given (Gemma)."""
    if not isinstance(pattern, int) or pattern < 1:
        raise ConfigError(f"{model}: sliding_window_pattern must be a whole number of at least 1, is {pattern!r}")
    num_layers = config["num_hidden_layers"]
    return _by_types(config, model, [FULL if (layer + 1) % pattern == 0 else SLIDING for layer in range(num_layers)])


def _by_types(config: dict[str, Any], model: str, default: list[str]) -> Windows:
    types = config.get("layer_types") or default
    if len(types) != len(default):
        raise ConfigError(f"{model}: layer_types names {len(types)} layers, num_hidden_layers is {len(default)}")
    unknown = sorted(set(types) - {FULL, SLIDING})
    if unknown:
        raise ConfigError(f"{model}: layer type {unknown[0]!r} is not supported; supported: {FULL}, {SLIDING}")
    window = _window(config, model)
    return tuple(window if kind == SLIDING else None for kind in types)


def _window(config: dict[str, Any], model: str) -> int | None:
    window = config.get("sliding_window")
    if window is not None and (not isinstance(window, int) or window < 1):
        raise ConfigError(f"{model}: sliding_window must be null or a whole number of at least 1, is {window!r}")
    return window
