"""Names of the architectures that pdmesh runs, apart from their code, so that a service without torch can refuse others."""

from collections.abc import Sequence

from pdmesh.errors import ConfigError

SUPPORTED = frozenset({"LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM"})
"""Hugging Face's class names; `registry` knows how each one's configuration is read."""


def supported_architecture(names: Sequence[str], model: str) -> str:
    """The first of a checkpoint's `architectures` that runs here. Raises ConfigError that lists what is supported."""
    for name in names:
        if name in SUPPORTED:
            return name
    found = names[0] if names else "of unknown name"
    raise ConfigError(f"{model}: architecture {found} is not supported; supported: {', '.join(sorted(SUPPORTED))}")
