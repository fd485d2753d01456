"""Loads the text side of a model from a Hugging Face directory or a GGUF file; needs no torch and no transformers."""

from pdmesh.errors import ConfigError
from pdmesh.models.gguf_config import gguf_config
from pdmesh.models.source import GGUFMetadata, ModelSource, read_config, read_gguf_metadata, resolve
from pdmesh.openai.text.gguf_tokenizer import build_gguf_tokenizer
from pdmesh.openai.text.hf_tokenizer import read_hf_tokenizer
from pdmesh.openai.text.model import TextModel

GGUF_SPECIAL_TOKENS = {
    "bos_token": "bos",
    "eos_token": "eos",
    "unk_token": "unknown",
    "pad_token": "padding",
    "sep_token": "seperator",  # the key is misspelt in the format
}


def load_text_model(model: str) -> TextModel:
    """Resolve `model` as the engines do and load its tokenizer and chat template. Blocks; raises ConfigError."""
    source = resolve(model)
    return _from_gguf(source) if source.kind == "gguf" else _from_directory(source)


def _from_directory(source: ModelSource) -> TextModel:
    # The configuration first: an architecture that is not supported is named before a tokenizer that is not there.
    config = read_config(source)
    found = read_hf_tokenizer(source.path)
    return TextModel(
        name=source.name,
        tokenizer=found.tokenizer,
        eos_token_ids=config["eos_token_id"],
        chat_template=found.chat_template,
        special_tokens=found.special_tokens,
    )


def _from_gguf(source: ModelSource) -> TextModel:
    metadata = read_gguf_metadata(source.path)
    config = gguf_config(metadata)
    template = metadata.get("tokenizer.chat_template")
    if template is not None and not isinstance(template, str):
        raise ConfigError(f"{source.path}: GGUF key tokenizer.chat_template must be a string; use another file")
    return TextModel(
        name=source.name,
        tokenizer=build_gguf_tokenizer(metadata),
        eos_token_ids=config["eos_token_id"],
        chat_template=template,
        special_tokens=_special_tokens(metadata),
    )


def _special_tokens(metadata: GGUFMetadata) -> dict[str, str]:
    tokens = metadata.strings("tokenizer.ggml.tokens")
    found: dict[str, str] = {}
    for role, name in GGUF_SPECIAL_TOKENS.items():
        token_id = metadata.get(f"tokenizer.ggml.{name}_token_id")
        if isinstance(token_id, int) and 0 <= token_id < len(tokens):
            found[role] = tokens[token_id]
    return found
