"""How many bytes a step takes beside weights and KV, from what tensors are made in small ones."""

import dataclasses
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch.overrides import TorchFunctionMode

from pdmesh.engine.backend import StepBatch
from pdmesh.models.decoder import DecoderModel
from pdmesh.models.kv_layout import KVLayout
from pdmesh.models.step import make_step
from pdmesh_kernels.paged_attention import MAX_GROUP_KEYS

# Tokens of the two measured steps: what they differ by is what a token takes.
FEW_TOKENS, MORE_TOKENS = 16, 48
# The model's logits; beside them, at worst, raw log-probabilities, and ids and logits of what may be drawn.
BYTES_PER_LOGIT = 4 + 4 + 8 + 4


def step_bytes(model: DecoderModel, layouts: tuple[KVLayout, ...], max_num_tokens: int, max_num_seqs: int) -> int:
    """Return an upper estimate for a step of that size, by running one layer of each kind on made-up tokens.

    Not in it: the prompt log-probabilities of a step's tokens, which few requests want (vocabulary × 8 bytes per token), and
    what a row of more than MAX_GROUP_KEYS tokens gathers beyond those.
    """
    config = model.config
    thin, thin_layouts = _one_layer_of_each_kind(model, layouts)
    # The first run fills caches that stay.
    _measure(thin, thin_layouts, MORE_TOKENS)
    few, more = (_measure(thin, thin_layouts, count) for count in (FEW_TOKENS, MORE_TOKENS))
    token_bytes = max(more - few, 0) / (MORE_TOKENS - FEW_TOKENS)
    fixed_bytes = max(few - token_bytes * FEW_TOKENS, 0)
    key_bytes = 2 * config.num_kv_heads * config.head_dim * model.dtype.itemsize
    if config.attention_soft_cap is not None:
        # Scores and their softmax, in float32.
        key_bytes += 2 * 4 * config.num_heads
    logits_bytes = max_num_seqs * config.vocab_size * BYTES_PER_LOGIT
    return int(fixed_bytes + token_bytes * max_num_tokens + key_bytes * MAX_GROUP_KEYS + logits_bytes)


@torch.inference_mode()
def peak_bytes(function: Callable[[], object]) -> int:
    """Run `function`; return the most bytes that tensors made in it took at once. What an operation uses inside is not seen."""
    accounting = _Accounting()
    with accounting:
        function()
    return accounting.peak_bytes


def _one_layer_of_each_kind(
    model: DecoderModel, layouts: tuple[KVLayout, ...]
) -> tuple[DecoderModel, tuple[KVLayout, ...]]:
    kinds = {layout.window: layout for layout in layouts}
    config = dataclasses.replace(model.config, num_layers=len(kinds), windows=tuple(kinds))
    weights = model.weights.with_layers([layout.layers[0] for layout in kinds.values()])
    thin_layouts = tuple(
        dataclasses.replace(layout, layers=(index,), num_layers=1) for index, layout in enumerate(kinds.values())
    )
    return DecoderModel(config, weights), thin_layouts


def _measure(model: DecoderModel, layouts: tuple[KVLayout, ...], num_tokens: int) -> int:
    block_size = layouts[0].block_size
    num_blocks = -(-num_tokens // block_size)
    kv_BLJKSD = torch.zeros(num_blocks, *layouts[0].block_shape, dtype=model.dtype)
    batch = StepBatch(
        token_ids=np.arange(num_tokens, dtype=np.int64) % model.config.vocab_size,
        positions=np.arange(num_tokens, dtype=np.int64),
        query_start=np.array([0, num_tokens], dtype=np.int64),
        context_len=np.zeros(1, dtype=np.int64),
        block_tables=[np.arange(num_blocks, dtype=np.int32)[None]] * len(layouts),
        logits_index=np.zeros(0, dtype=np.int64),
    )
    step = make_step(batch, layouts, model.dtype)
    return peak_bytes(lambda: model.forward(step, layouts, kv_BLJKSD))


class _Accounting(TorchFunctionMode):
    """Counts the storages that calls into torch make, until they go."""

    # Not a TorchDispatchMode, which would see inside the calls: its first use imports a second's worth of torch's compiler.

    def __init__(self) -> None:
        super().__init__()
        self.peak_bytes = 0
        self._live_bytes = 0
        self._known: weakref.WeakSet[torch.UntypedStorage] = weakref.WeakSet()

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        for tensor in _tensors((args, kwargs)):
            self._known.add(tensor.untyped_storage())
        result = func(*args, **(kwargs or {}))
        for tensor in _tensors(result):
            self._note(tensor.untyped_storage())
        return result

    def _note(self, storage: torch.UntypedStorage) -> None:
        if storage in self._known:
            return
        self._known.add(storage)
        self._live_bytes += storage.nbytes()
        self.peak_bytes = max(self.peak_bytes, self._live_bytes)
        weakref.finalize(storage, self._forget, storage.nbytes())

    def _forget(self, num_bytes: int) -> None:
        self._live_bytes -= num_bytes


def _tensors(values: object) -> list[torch.Tensor]:
    if isinstance(values, torch.Tensor):
        return [values]
    if isinstance(values, list | tuple):
        return [tensor for value in values for tensor in _tensors(value)]
    if isinstance(values, dict):
        return [tensor for value in values.values() for tensor in _tensors(value)]
    return []
