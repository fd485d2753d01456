"""From a model's name to its configuration and its open weights, for every backend. Imports no torch."""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from pdmesh.errors import ConfigError
from pdmesh.models.checkpoint_quantization import CheckpointQuantization, parse_quantization
from pdmesh.models.gguf_metadata import read_gguf_metadata
from pdmesh.models.gguf_weights import GGUFWeights
from pdmesh.models.model_config import ModelConfig
from pdmesh.models.packed_word_weights import PackedWordWeights
from pdmesh.models.registry import parse_model_config
from pdmesh.models.safetensors_weights import SafetensorsWeights
from pdmesh.models.source import ModelSource, read_config, resolve
from pdmesh.models.weights import WeightReader


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A model that was found and checked, its weights not read yet."""

    path: Path
    config: ModelConfig
    reader: WeightReader
    eos_token_ids: tuple[int, ...]


@contextlib.contextmanager
def open_checkpoint(name: str) -> Iterator[Checkpoint]:
    """Find and check a model, and open its weights. Blocks; raises ConfigError."""
    source = resolve(name)
    raw_config = read_config(source)
    config = parse_model_config(raw_config, str(source.path))
    reader = open_weights(source, config, parse_quantization(raw_config, str(source.path)))
    with contextlib.closing(reader):
        yield Checkpoint(source.path, config, reader, tuple(raw_config["eos_token_id"]))


def open_weights(source: ModelSource, config: ModelConfig, quantization: CheckpointQuantization | None) -> WeightReader:
    """Open a checkpoint; `quantization` is `parse_quantization`'s."""
    if source.kind == "hf":
        stored = SafetensorsWeights(source.path)
        if quantization is None:
            return stored
        try:
            return PackedWordWeights(stored, quantization)
        except ConfigError:
            stored.close()
            raise
    return GGUFWeights(read_gguf_metadata(source.path), config.num_heads, config.num_kv_heads)
