"""From a model's name to a model in torch's memory."""

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from pdmesh.errors import ConfigError
from pdmesh.models.checkpoint import open_checkpoint
from pdmesh.models.content_digest import FileStates
from pdmesh.models.decoder import DecoderModel
from pdmesh.models.decoder_weights import DecoderWeights
from pdmesh.models.fingerprint import Fingerprints, fingerprints
from pdmesh.models.weights import fill


@dataclass(frozen=True, slots=True)
class LoadedModel:
    model: DecoderModel
    fingerprints: Fingerprints
    eos_token_ids: tuple[int, ...]
    duration_s: float


def load_model(name: str, dtype: torch.dtype, report: Callable[[float], None]) -> LoadedModel:
    """Find, check and read a model; `report` gets the fraction done. Blocks; raises ConfigError."""
    started = time.monotonic()
    with open_checkpoint(name) as checkpoint:
        config, reader = checkpoint.config, checkpoint.reader
        states = FileStates(reader.stored_regions())
        try:
            weights = DecoderWeights(config, dtype)
            fill(weights.targets, reader, str(checkpoint.path), report)
            weights.finish()
        except RuntimeError as exc:
            if "allocate" not in str(exc):
                raise
            raise ConfigError(
                f"{checkpoint.path}: not enough memory for the weights; use a smaller model or --dtype"
            ) from exc
        names = fingerprints(config, reader.stored_regions(), str(dtype).removeprefix("torch."))
        states.check()
    return LoadedModel(DecoderModel(config, weights), names, checkpoint.eos_token_ids, time.monotonic() - started)
