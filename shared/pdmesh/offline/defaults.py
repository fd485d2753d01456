"""What a model's own generation_config.json says of sampling, as vLLM takes it."""

import json
from typing import Any

from pdmesh.errors import ConfigError
from pdmesh.models.source import resolve

FILE_NAME = "generation_config.json"
# Name there -> name in SamplingParams.
_TAKEN = {
    "repetition_penalty": "repetition_penalty",
    "temperature": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "max_new_tokens": "max_tokens",
}


def default_sampling(model: str) -> dict[str, Any]:
    """Return the sampling parameters that the model comes with; none for a GGUF file. Blocks; raises ConfigError."""
    source = resolve(model)
    path = source.path / FILE_NAME
    if source.kind == "gguf" or not path.is_file():
        return {}
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as exc:
        raise ConfigError(f"{path}: cannot be read as JSON ({exc})") from exc
    if not isinstance(values, dict):
        raise ConfigError(f"{path}: must be a JSON object")
    return {name: values[key] for key, name in _TAKEN.items() if values.get(key) is not None}
