"""The one door to a device: load a model, hold its KV, run a step. The CPU library and the Triton backend implement it too.

The core knows nothing about tensors' devices: it builds a `StepBatch` of plain numpy arrays, and gets float32 logits back.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from pdmesh.connector.pool import KVPool
from pdmesh.engine.batch_defaults import DeviceInfo
from pdmesh.engine.compute_threads import Place
from pdmesh.engine.step_logits import StepLogits
from pdmesh.protocol.layout import Layout

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class KVGroupSpec:
    """One KV group: layers with the same rule, and what a block of it holds."""

    kind: str
    """full | sliding | latent | state."""
    layers: tuple[int, ...]
    block_size: int
    """Tokens per block; the same in all groups of a model."""
    block_bytes: int
    """The same in all groups of a model, so that they share one pool: a group with fewer layers is padded."""
    window: int = 0
    """Tokens that a query sees, itself included, when `kind` is sliding; 0: all."""
    fingerprint: str
    """Names the layout inside a block (SHA-256 prefix over kind, layers, heads, head_dim, dtype, block size, packing)."""
    item_dtype: str = ""
    """Of keys and values: the model's, or int8."""
    layout: Layout | None = None
    """What `fingerprint` names, where other engines may convert it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelInfo:
    """What the rest of the engine must know of a loaded model."""

    fingerprint: str
    """Weights, dtype, rope, quantisation: engines with equal ones compute the same KV."""
    weights_fingerprint: str = ""
    """The same without the dtypes of numbers and of KV: engines with equal ones compute the same KV but for rounding."""
    groups: tuple[KVGroupSpec, ...]
    max_model_len: int
    """The model's own limit, tokens."""
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    dtype: str
    expanded_weights: dict[str, int] = field(default_factory=dict)
    """How many matrices that the checkpoint has in fewer bits are kept in 16, by reason."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepBatch:
    """One step's input. N rows (one per running choice), T tokens in all, rows concatenated.

    Row i brings query tokens [query_start[i], query_start[i+1]) at positions context_len[i] … of its sequence; its
    blocks cover context_len[i] + its query length tokens. Logits are wanted for the T-indices in `logits_index`.
    """

    token_ids: NDArray[np.int64]
    """[T]"""
    positions: NDArray[np.int64]
    """[T]"""
    query_start: NDArray[np.int64]
    """[N + 1]"""
    context_len: NDArray[np.int64]
    """[N] tokens whose KV is in the pool before this step."""
    block_tables: list[NDArray[np.int32]]
    """[group] -> [N, W] block ids, in order of position; -1 behind a row's end, and before what a sliding group's window
    needs: those must not be read."""
    logits_index: NDArray[np.int64]
    """[R] indices into T; rows of the returned logits come in this order."""


class BackendLostError(Exception):
    """What computes is not to be trusted any more, for this step or any other: the engine core has to end."""


class Backend(ABC):
    """A device that can run the model. One instance per engine core; not thread-safe."""

    name: str
    row_invariant: bool
    """Whether a row's result does not depend on the batch around it (DESIGN, promise 1)."""
    default_block_size: int
    instruction_set: str = ""
    """That it chose, where there was a choice."""
    step_thread: Place = Place()
    """Where the thread has to be that makes every `forward`."""
    device: DeviceInfo = DeviceInfo()
    """What the defaults of a step's size depend on; a CPU unless a backend says otherwise."""

    @abstractmethod
    def load(self, model: str, dtype: str, block_size: int | None, progress: ProgressCallback) -> ModelInfo:
        """Read a model (HF directory or id, GGUF file). `dtype` is auto|float32|bfloat16|float16.
        Raises ConfigError that names the path or architecture and the remedy."""

    @abstractmethod
    def available_kv_bytes(self, fraction: float) -> int:
        """Bytes that KV may take: `fraction` of the device's memory less what is in use."""

    @abstractmethod
    def profile(self, max_num_tokens: int, max_num_seqs: int) -> int:
        """Run the model once on made-up data, before `bind`; return the bytes that a step of that size needs beside weights
        and KV (measured on a smaller one and scaled where that is exact enough)."""

    @abstractmethod
    def bind(self, pool: KVPool) -> None:
        """Use `pool` (already sized) as KV memory of all groups."""

    @abstractmethod
    def copy_blocks(self, pairs: list[tuple[int, int]]) -> None:
        """Copy whole blocks (source, target) before the next forward."""

    @abstractmethod
    def forward(self, batch: StepBatch) -> torch.Tensor | StepLogits:
        """Write the KV of all T tokens; return logits [R, vocab] float32 on the device, or on the host with what is known of
        them. Raises BackendLostError."""

    @abstractmethod
    def close(self) -> None: ...


class ProgressCallback:
    """Called with (stage, fraction 0…1) while loading."""

    def __call__(self, stage: str, fraction: float) -> None:
        """The default reports nothing."""

    def of_weights(self) -> Callable[[float], None]:
        """Return what to tell the fraction of the weights that was read: it passes on every whole percent, once."""
        reported = -1

        def report(fraction: float) -> None:
            nonlocal reported
            percent = int(fraction * 100)
            if percent > reported:
                reported = percent
                self("weights", percent / 100)

        return report
