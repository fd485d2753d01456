"""Custom logits processors: operators' own code between the built-in edits of the logits and the temperature.

A processor is a class derived from `LogitsProcessor`. It is found by name (`--logits-processors module:Class`) or as an entry
point of the group `pdmesh.logits_processors`, checked when a request is admitted, and applied in the worker's thread.
`docs/sampling.md` shows how to write one.
"""

from __future__ import annotations

import importlib
import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import entry_points
from typing import TYPE_CHECKING, Any, cast

import numpy as np
from numpy.typing import NDArray

from pdmesh.errors import ConfigError, InternalError, InvalidRequest, MeshError
from pdmesh.protocol.messages import ExtraArgs, SamplingParams

if TYPE_CHECKING:
    import torch

log = logging.getLogger(__name__)

ENTRY_POINT_GROUP = "pdmesh.logits_processors"
# What is told to clients of an exception; all of it is logged.
MAX_TOLD_CHARS = 300


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
        anything else as an InternalError, as are logits that are NaN or infinite when it returns.
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


def make_processors(
    classes: Sequence[type[LogitsProcessor]], vocab_size: int, num_threads: int
) -> list[LogitsProcessor]:
    """Construct each for the host, where the sampler works. Raises ConfigError that names the one that fails.

    Torch computes with `num_threads` from then on, in threads that have not used it yet.
    """
    if not classes:
        return []
    import torch

    # It would take all cores, whatever the engine was given.
    torch.set_num_threads(num_threads)
    made = []
    for cls in classes:
        try:
            made.append(cls(vocab_size, torch.device("cpu")))
        except BaseException as exc:  # it is somebody else's code, which may call sys.exit
            raise ConfigError(f"logits-processors: {name_of(cls)} failed to start: {_told(exc)}") from exc
    return made


def check_processors(classes: Sequence[type[LogitsProcessor]], sampling: SamplingParams) -> None:
    """Ask every processor about a request. Raises InvalidRequest, or InternalError when one fails otherwise."""
    for cls in classes:
        with _guarded(cls):
            try:
                cls.validate(sampling)
            except ValueError as exc:
                raise InvalidRequest(f"vllm_xargs: {exc}", param="vllm_xargs") from exc


def active_processors(processors: Sequence[LogitsProcessor], sampling: SamplingParams) -> list[LogitsProcessor]:
    """Return those that a request asks for. Raises MeshError when one fails."""
    active = []
    for processor in processors:
        with _guarded(type(processor)):
            if processor.is_active(sampling):
                active.append(processor)
    return active


def apply_processor(processor: LogitsProcessor, logits: NDArray[np.float32], row: RowView) -> None:
    """Have one choice's logits changed in place. Raises MeshError when that fails, or makes logits that are elsewhere."""
    import torch

    logits_V = torch.from_numpy(logits)
    address = logits_V.data_ptr()
    with _guarded(type(processor)), torch.inference_mode():
        result = cast(Callable[..., object], processor.apply)(logits_V, row)
        if result is not None and result is not logits_V:
            raise TypeError(f"apply returned {type(result).__name__}; it must change the logits in place")
        if logits_V.data_ptr() != address:
            raise TypeError("apply gave the logits other memory; it must change them in place")


def name_of(cls: type[LogitsProcessor]) -> str:
    """What messages call a processor."""
    return cls.__qualname__


@contextmanager
def _guarded(cls: type[LogitsProcessor]) -> Iterator[None]:
    """Have whatever somebody else's code raises end one request and no more: it leaves as a MeshError that can be sent."""
    try:
        yield
    except MeshError as exc:
        exc.message, exc.param = _plain(exc.message), None if exc.param is None else _plain(exc.param)
        raise
    except BaseException as exc:  # a library it calls may call sys.exit
        log.error("logits processor %s failed", name_of(cls), exc_info=exc)
        raise InternalError(f"logits processor {name_of(cls)} failed: {_told(exc)}") from exc


def _imported(name: str) -> object:
    module_name, separator, attribute = name.strip().partition(":")
    if not (module_name and separator and attribute):
        raise ConfigError(f"logits-processors: {name!r} is not of the form module:Class")
    try:
        value: Any = importlib.import_module(module_name)
        for part in attribute.split("."):
            value = getattr(value, part)
    except BaseException as exc:  # importing runs somebody else's code, which may call sys.exit
        raise ConfigError(f"logits-processors: {name!r} cannot be imported: {_told(exc)}") from exc
    return value


def _checked(name: str, value: object) -> type[LogitsProcessor]:
    if not (isinstance(value, type) and issubclass(value, LogitsProcessor)):
        raise ConfigError(f"logits-processors: {name!r} is not a subclass of {__name__}:LogitsProcessor")
    return value


def _told(exc: BaseException) -> str:
    text = str(exc)
    return _plain(f"{type(exc).__name__}: {text}" if text else type(exc).__name__)


def _plain(text: object) -> str:
    """One line that is short and can be encoded."""
    line = " ".join(str(text).split()).encode(errors="replace").decode()
    return line if len(line) <= MAX_TOLD_CHARS else f"{line[:MAX_TOLD_CHARS]}…"
