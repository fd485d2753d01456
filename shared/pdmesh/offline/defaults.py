"""What a model's own generation_config.json says of sampling, as vLLM takes it."""

from typing import Any

from pdmesh.models.hf_config import read_json
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
    values = read_json(path)
    return {name: values[key] for key, name in _TAKEN.items() if values.get(key) is not None}
