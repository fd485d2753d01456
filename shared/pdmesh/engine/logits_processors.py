"""Custom logits processors: operators' own code between the built-in edits of the logits and the temperature.

A processor is a class derived from `LogitsProcessor`. It is found by name (`--logits-processors module:Class`) or as an entry
point of the group `pdmesh.logits_processors`, checked when a request is admitted, and applied in the worker's thread.
`docs/sampling.md` shows how to write one.
"""

from __future__ import annotations

import importlib
import logging
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from importlib.metadata import entry_points
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from pdmesh.errors import ConfigError, InternalError, InvalidRequest, MeshError
from pdmesh.protocol.messages import ExtraArgs, SamplingParams

if TYPE_CHECKING:
    import torch

log = logging.getLogger(__name__)

ENTRY_POINT_GROUP = "pdmesh.logits_processors"


@dataclass(frozen=True, slots=True)
class RowView:
    """What a processor may see of the choice whose next token it is asked about."""

    prompt: NDArray[np.uint32]
    """Read-only."""
    output: NDArray[np.uint32]
    """Generated so far, on another engine too; read-only, valid during the call."""
    sampling: SamplingParams
    choice: int
    """Index among the request's `n`."""

    @property
    def extra_args(self) -> ExtraArgs:
        """The request's `vllm_xargs`."""
        return self.sampling.extra_args


class LogitsProcessor(ABC):
    """One instance serves all choices of an engine. It keeps nothing of a choice but what its tokens tell: a choice may be
    preempted, resumed on another engine, or run a step whose token is thrown away."""

    def __init__(self, vocab_size: int, device: torch.device) -> None:
        """`device` is where the logits will be."""
        self.vocab_size = vocab_size
        self.device = device

    @classmethod  # noqa: B027 - most have nothing to refuse
    def validate(cls, sampling: SamplingParams) -> None:
        """Raise InvalidRequest (or ValueError) when a request's `extra_args` are wrong. Called at admission."""

    def is_active(self, sampling: SamplingParams) -> bool:
        """Whether `apply` is to be called for a request at all; asked once per choice."""
        return True

    @abstractmethod
    def apply(self, logits_V: torch.Tensor, row: RowView) -> None:
        """Change one choice's logits, float32 [vocab_size], in place; -inf excludes a token.

        Called once per generated token. What it raises ends this choice, and no other: InvalidRequest with status 400,
        anything else as an InternalError.
        """


def load_processors(names: Iterable[str]) -> list[type[LogitsProcessor]]:
    """Return the installed processors (entry points, by name), then those that `names` list as `module:Class`, each once.

    Raises ConfigError that tells which one could not be imported and why.
    """
    found: dict[type[LogitsProcessor], None] = {}
    for entry in sorted(entry_points(group=ENTRY_POINT_GROUP), key=lambda entry: entry.name):
        found[_checked(f"entry point {entry.name} = {entry.value}", _imported(entry.value))] = None
    for name in names:
        found[_checked(name, _imported(name))] = None
    for cls in found:
        log.info("logits processor %s:%s", cls.__module__, cls.__qualname__)
    return list(found)


def make_processors(classes: Sequence[type[LogitsProcessor]], vocab_size: int) -> list[LogitsProcessor]:
    """Construct each for the host, where the sampler works. Raises ConfigError that names the one that fails."""
    import torch

    made = []
    for cls in classes:
        try:
            made.append(cls(vocab_size, torch.device("cpu")))
        except Exception as exc:  # it is somebody else's code
            raise ConfigError(f"logits-processors: {cls.__qualname__} failed to start: {_told(exc)}") from exc
    return made


def check_processors(classes: Sequence[type[LogitsProcessor]], sampling: SamplingParams) -> None:
    """Ask every processor about a request. Raises InvalidRequest, or InternalError when one fails otherwise."""
    for cls in classes:
        try:
            cls.validate(sampling)
        except MeshError:
            raise
        except ValueError as exc:
            raise InvalidRequest(f"vllm_xargs: {exc}", param="vllm_xargs") from exc
        except Exception as exc:  # it is somebody else's code
            log.exception("logits processor %s failed to validate a request", cls.__qualname__)
            raise InternalError(f"logits processor {cls.__qualname__} failed: {_told(exc)}") from exc


def _imported(name: str) -> object:
    module_name, separator, attribute = name.strip().partition(":")
    if not (module_name and separator and attribute):
        raise ConfigError(f"logits-processors: {name!r} is not of the form module:Class")
    try:
        value: Any = importlib.import_module(module_name)
        for part in attribute.split("."):
            value = getattr(value, part)
    except Exception as exc:  # importing runs somebody else's code
        raise ConfigError(f"logits-processors: {name!r} cannot be imported: {_told(exc)}") from exc
    return value


def _checked(name: str, value: object) -> type[LogitsProcessor]:
    if not (isinstance(value, type) and issubclass(value, LogitsProcessor)):
        raise ConfigError(f"logits-processors: {name!r} is not a subclass of {__name__}:LogitsProcessor")
    return value


def _told(exc: Exception) -> str:
    return f"{type(exc).__name__}: {exc}"
