"""How many sequences and tokens a step has when nobody said: vLLM's defaults by device and use, and what to make of halves."""

import logging
from dataclasses import dataclass
from typing import Literal

from pydantic import ValidationError

from pdmesh.config import EngineConfig
from pdmesh.errors import ConfigError

log = logging.getLogger(__name__)

GIB = 1 << 30
# A prompt's chunk is what holds up other requests' tokens; its share of a step is linear in the budget.
INTERACTIVITY_DIVISOR = 4
THROUGHPUT_FACTOR = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceInfo:
    """What the defaults depend on."""

    kind: Literal["cpu", "gpu"] = "cpu"
    name: str = ""
    memory_bytes: int = 0
    """Of a GPU, in all; 0 where nobody could tell."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchDefaults:
    """For settings that are 0."""

    max_num_seqs: int
    max_num_batched_tokens: int


def batch_defaults(device: DeviceInfo, *, offline: bool) -> BatchDefaults:
    """Return vLLM 0.32's defaults: a server keeps steps short, an offline run (`LLM`, run-batch) has only its total to mind."""
    if device.kind == "cpu":
        if offline:
            return BatchDefaults(max_num_seqs=256, max_num_batched_tokens=4096)
        return BatchDefaults(max_num_seqs=128, max_num_batched_tokens=2048)
    if device.memory_bytes >= 160 * GIB:
        return BatchDefaults(max_num_seqs=1024, max_num_batched_tokens=16384)
    # Large budgets were found to slow the A100 down, whatever its memory.
    if device.memory_bytes >= 70 * GIB and "a100" not in device.name.lower():
        return BatchDefaults(max_num_seqs=1024, max_num_batched_tokens=16384 if offline else 8192)
    return BatchDefaults(max_num_seqs=256, max_num_batched_tokens=8192 if offline else 2048)


def resolve_batch(config: EngineConfig, device: DeviceInfo, *, offline: bool, max_model_len: int) -> EngineConfig:
    """Return `config` with both numbers set, and log them. What is given is kept, and a default gives way to it.

    Raises ConfigError when the settings around them contradict what they became.
    """
    resolved = check_batch(config, device, offline=offline, max_model_len=max_model_len)
    if config.performance_mode != "balanced" and config.max_num_seqs and config.max_num_batched_tokens:
        log.info(
            "performance-mode %s is not used: max-num-seqs and max-num-batched-tokens are both given",
            config.performance_mode,
        )
    log.info(
        "steps of up to %d sequences (max-num-seqs%s) and %d tokens (max-num-batched-tokens%s) on %s, performance mode %s",
        resolved.max_num_seqs,
        "" if config.max_num_seqs else ", default",
        resolved.max_num_batched_tokens,
        "" if config.max_num_batched_tokens else ", default",
        device.name or device.kind.upper(),
        config.performance_mode,
    )
    return resolved


def check_batch(config: EngineConfig, device: DeviceInfo, *, offline: bool, max_model_len: int) -> EngineConfig:
    """Do as `resolve_batch`, and log nothing: for a look before the start."""
    defaults = batch_defaults(device, offline=offline)
    num_seqs = config.max_num_seqs or _by_mode(config, defaults.max_num_seqs)
    num_tokens = config.max_num_batched_tokens or _budget_by_mode(config, defaults.max_num_batched_tokens)
    if not config.max_num_batched_tokens:
        # Even if all rows held the longest sequences, there would be no more to compute.
        num_tokens = max(min(num_tokens, num_seqs * max_model_len), num_seqs)
    elif not config.max_num_seqs:
        num_seqs = min(num_seqs, num_tokens)
    try:
        return EngineConfig.model_validate(
            config.model_dump(include=set(EngineConfig.model_fields))
            | {"max_num_seqs": num_seqs, "max_num_batched_tokens": num_tokens}
        )
    except ValidationError as exc:
        raise ConfigError(exc.errors()[0]["msg"].removeprefix("Value error, ")) from exc


def _by_mode(config: EngineConfig, value: int) -> int:
    return value * THROUGHPUT_FACTOR if config.performance_mode == "throughput" else value


def _budget_by_mode(config: EngineConfig, value: int) -> int:
    return value // INTERACTIVITY_DIVISOR if config.performance_mode == "interactivity" else _by_mode(config, value)
