"""What a Hugging Face checkpoint's `quantization_config` says: AWQ and GPTQ are read, all else is refused by name.

Free of torch.
"""

from dataclasses import dataclass
from enum import Enum
from typing import Any

from pdmesh.errors import ConfigError


class PackedFormat(Enum):
    """How codes lie in the 32-bit words of `qweight`."""

    AWQ = "awq"
    """[K, n / 8]: a word has eight outputs in AWQ's order."""
    GPTQ = "gptq"
    """[K / 8, n] (8 bits: K / 4): a word has consecutive inputs; zero points are stored one less than they are."""
    GPTQ_V2 = "gptq_v2"
    """The same with zero points as they are."""


@dataclass(frozen=True, slots=True)
class CheckpointQuantization:
    """Of all linear layers but those that have a plain weight."""

    format: PackedFormat
    bits: int
    group: int | None
    """Inputs that share a scale; None: all."""


def parse_quantization(config: dict[str, Any], model: str) -> CheckpointQuantization | None:
    """Read config.json's `quantization_config`; None when there is none. Raises ConfigError, naming `model` and the field."""
    given = config.get("quantization_config")
    if not given:
        return None
    if not isinstance(given, dict):
        raise ConfigError(f"{model}: quantization_config must be an object, is {given!r}")
    method = given.get("quant_method", "unknown")
    if method == "awq":
        version = str(given.get("version", "gemm")).lower()
        if version != "gemm":
            raise ConfigError(f"{model}: quantization_config.version {version!r} is not supported; supported: gemm")
        packed = PackedFormat.AWQ
    elif method == "gptq":
        layout = given.get("checkpoint_format") or "gptq"
        if layout not in ("gptq", "gptq_v2"):
            raise ConfigError(
                f"{model}: quantization_config.checkpoint_format {layout!r} is not supported; supported: gptq, gptq_v2"
            )
        packed = PackedFormat(layout)
        if given.get("dynamic"):
            raise ConfigError(f"{model}: quantization_config.dynamic (bits by layer) is not supported")
    else:
        raise ConfigError(
            f"{model}: quantisation {method!r} is not supported; supported: awq, gptq, GGUF files, unquantised checkpoints"
        )
    return CheckpointQuantization(packed, _bits(given, packed, model), _group(given, model))


def already_quantised(model: str, quantization: str) -> ConfigError:
    """Return what is raised where `--quantization` is asked of a checkpoint that has any quantised weights."""
    return ConfigError(
        f"quantization {quantization}: {model} is quantised already, and nothing is quantised a second time; leave it none"
    )


def no_four_bits(model: str) -> ConfigError:
    """Return what is raised where `--quantization int8_activations` would change nothing."""
    return ConfigError(
        f"quantization int8_activations: {model} has no weights that are kept in 4 bits, for which alone it is; leave it none"
    )


def _bits(given: dict[str, Any], packed: PackedFormat, model: str) -> int:
    bits = given.get("bits", given.get("w_bit"))
    supported = (4,) if packed is PackedFormat.AWQ else (4, 8)
    if not isinstance(bits, int) or bits not in supported:
        choices = " and ".join(map(str, supported))
        raise ConfigError(
            f"{model}: quantization_config.bits {bits!r} is not supported for {packed.value}; supported: {choices}"
        )
    return bits


def _group(given: dict[str, Any], model: str) -> int | None:
    group = given.get("group_size", given.get("q_group_size", -1))
    if group == -1:
        return None
    if isinstance(group, bool) or not isinstance(group, int) or group < 1:
        raise ConfigError(f"{model}: quantization_config.group_size must be -1 or a whole number above 0, is {group!r}")
    return group
