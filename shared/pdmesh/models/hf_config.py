"""A Hugging Face folder's config.json and generation_config.json, old and new spellings made one. Free of torch."""

import json
from pathlib import Path
from typing import Any

from pdmesh.errors import ConfigError
from pdmesh.models.architectures import DEFAULTS

FULL, SLIDING = "full_attention", "sliding_attention"
"""Names of layer types."""


def hf_config(folder: Path) -> dict[str, Any]:
    """Read. Keys as `source.read_config` promises, and all others of config.json. Raises ConfigError."""
    config = read_json(folder / "config.json")
    config = DEFAULTS.get(config.get("model_type", ""), {}) | config
    generation_path = folder / "generation_config.json"
    generation = read_json(generation_path) if generation_path.is_file() else {}
    config |= _rope(config, str(folder))
    config["eos_token_id"] = list(dict.fromkeys(_ids(generation, "eos_token_id") + _ids(config, "eos_token_id")))
    config["bos_token_id"] = next(iter(_ids(config, "bos_token_id")), None)
    config["tie_word_embeddings"] = bool(config.get("tie_word_embeddings", False))
    config["rms_norm_eps"] = float(config.get("rms_norm_eps", 1e-6))
    config["dtype"] = config.get("dtype") or config.get("torch_dtype")
    config.setdefault("architectures", [])
    return config


def read_json(path: Path) -> dict[str, Any]:
    """Return a file's JSON object. Raises ConfigError that names it."""
    try:
        loaded = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as exc:
        raise ConfigError(f"{path}: cannot be read as JSON ({exc})") from exc
    if not isinstance(loaded, dict):
        raise ConfigError(f"{path}: must be a JSON object")
    return loaded


def _rope(config: dict[str, Any], model: str) -> dict[str, Any]:
    # transformers 5 writes rope_parameters (theta inside, by layer type where they differ); before, all stood apart.
    given = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if not isinstance(given, dict):
        raise ConfigError(f"{model}: rope_parameters must be an object, is {given!r}")
    is_by_type = FULL in given or SLIDING in given
    theta, scaling = _rope_of(given.get(FULL) if is_by_type else given, config.get("rope_theta"))
    found = {"rope_theta": theta, "rope_scaling": scaling, "rope_local_theta": None, "rope_local_scaling": None}
    local_theta = config.get("rope_local_base_freq")
    if is_by_type or local_theta is not None:
        local = _rope_of(given.get(SLIDING) if is_by_type else None, local_theta)
        found["rope_local_theta"], found["rope_local_scaling"] = local
    return found


def _rope_of(given: dict[str, Any] | None, default_theta: float | None) -> tuple[float, dict[str, Any] | None]:
    rope = dict(given or {})
    old_name = rope.pop("type", None)
    rope["rope_type"] = rope.get("rope_type") or old_name or "default"
    theta = float(rope.pop("rope_theta", None) or default_theta or 10000.0)
    return theta, None if rope["rope_type"] == "default" else rope


def _ids(config: dict[str, Any], key: str) -> list[int]:
    value = config.get(key)
    if value is None:
        return []
    return [int(item) for item in value] if isinstance(value, list) else [int(value)]
