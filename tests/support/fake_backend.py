"""A backend whose KV is the token ids themselves, and whose logits are a hash of all KV that a row can see.

It really writes into the pool and reads back through the block tables, so that a wrong table, a block shared by mistake or a
copy that missed a byte gives other tokens than `expected_tokens`, which computes them from the ids alone. With several
groups every group has words of its own, and a sliding one is read only inside its window.
"""

import copy
import hashlib

import numpy as np
import torch
from numpy.typing import NDArray

from pdmesh.connector.pool import KVPool
from pdmesh.engine.backend import Backend, KVGroupSpec, ModelInfo, ProgressCallback, StepBatch
from pdmesh.protocol.layout import Layout

VOCAB_SIZE = 64
EOS = 1
WORD_BYTES = 8
PROFILED_BYTES = 1 << 16
# Above any position: a word also tells which group wrote it.
GROUP_STEP = 1 << 24

FULL = (0,)

Words = NDArray[np.uint32]


class FakeBackend(Backend):
    """8 bytes per token in each group: its id plus one, and its position plus one with the group above it."""

    name = "fake"
    row_invariant = True
    default_block_size = 4

    def __init__(self, block_size: int = 4, windows: list[int] | None = None) -> None:
        """`windows` has one entry per KV group: 0 for full attention, else the tokens that a query sees."""
        self._block_size = block_size
        self.windows = tuple(windows or FULL)
        self._pool: KVPool | None = None
        self.steps: list[StepBatch] = []
        self.copies: list[tuple[int, int]] = []
        self.fail_next = 0
        self.nan_tokens: set[int] = set()
        """A row whose last token is one of these gets NaN logits."""

    def load(self, model: str, dtype: str, block_size: int | None, progress: ProgressCallback) -> ModelInfo:
        size = block_size or self._block_size
        return ModelInfo(
            fingerprint="fake-model",
            groups=tuple(_group(index, window, size) for index, window in enumerate(self.windows)),
            max_model_len=4096,
            vocab_size=VOCAB_SIZE,
            eos_token_ids=(EOS,),
            dtype="float32",
        )

    def available_kv_bytes(self, fraction: float) -> int:
        return 1 << 20

    def profile(self, max_num_tokens: int, max_num_seqs: int) -> int:
        assert self._pool is None, "profile comes before bind"
        return PROFILED_BYTES

    def bind(self, pool: KVPool) -> None:
        self._pool = pool

    def copy_blocks(self, pairs: list[tuple[int, int]]) -> None:
        assert self._pool is not None
        self.copies += pairs
        for source, target in pairs:
            self._pool.blocks[target] = self._pool.blocks[source]

    def forward(self, batch: StepBatch) -> torch.Tensor:
        assert self._pool is not None
        # A step of the same rows comes in the arrays of the one before.
        self.steps.append(copy.deepcopy(batch))
        if self.fail_next:
            self.fail_next -= 1
            raise RuntimeError("the device is on fire")
        assert len(batch.block_tables) == len(self.windows), "one block table per group"
        for group in range(len(self.windows)):
            for row in range(len(batch.context_len)):
                self._write(batch, group, row)
        rows = np.searchsorted(batch.query_start, batch.logits_index, side="right") - 1
        logits = torch.empty(len(batch.logits_index), VOCAB_SIZE)
        for place, (row, index) in enumerate(zip(rows.tolist(), batch.logits_index.tolist(), strict=True)):
            logits[place] = _logits_of(self._seen(batch, row, int(batch.positions[index])))
            if int(batch.token_ids[index]) in self.nan_tokens:
                logits[place, 3] = torch.nan
        return logits

    def close(self) -> None:
        self._pool = None

    def _write(self, batch: StepBatch, group: int, row: int) -> None:
        start, end = int(batch.query_start[row]), int(batch.query_start[row + 1])
        positions = np.arange(end - start) + int(batch.context_len[row])
        assert (batch.positions[start:end] == positions).all(), "positions count from the context's end"
        blocks, size = self._blocks(batch, group, row, positions)
        words = self._words
        words[blocks, positions % size, 0] = batch.token_ids[start:end] + 1
        words[blocks, positions % size, 1] = positions + 1 + group * GROUP_STEP

    def _seen(self, batch: StepBatch, row: int, position: int) -> list[Words]:
        """The words of each group that a query at `position` attends to."""
        seen = []
        for group, window in enumerate(self.windows):
            positions = np.arange(max(position - window + 1, 0) if window else 0, position + 1)
            blocks, size = self._blocks(batch, group, row, positions)
            words = self._words[blocks, positions % size]
            if window:
                assert (words[:, 1] == positions + 1 + group * GROUP_STEP).all(), "the window holds foreign words"
            seen.append(words)
        if len(self.windows) > 1 and 0 in self.windows:
            full = seen[self.windows.index(0)]
            for words in seen:
                assert (words[:, 0] == full[len(full) - len(words) :, 0]).all(), "groups hold different tokens"
        return seen

    def _blocks(
        self, batch: StepBatch, group: int, row: int, positions: NDArray[np.int64]
    ) -> tuple[NDArray[np.int32], int]:
        """The block of each position, which must be there."""
        size, table = self._words.shape[1], batch.block_tables[group][row]
        assert table.dtype == np.int32
        assert positions[-1] // size < len(table), "the table is too short"
        blocks = table[positions // size]
        assert (blocks >= 0).all(), "a block that is needed is not in the table"
        return blocks, size

    @property
    def _words(self) -> Words:
        assert self._pool is not None
        # As a layout's keys and values of one number each: all ids of a block, then all positions.
        return self._pool.blocks.view("<u4").reshape(self._pool.shape.num_blocks, 2, -1).swapaxes(1, 2)


def logits_after(token_ids: list[int], windows: tuple[int, ...] = FULL) -> torch.Tensor:
    """Return the logits that follow `token_ids`."""
    ids, positions = np.array(token_ids, dtype="<u4") + 1, np.arange(1, len(token_ids) + 1, dtype="<u4")
    seen = []
    for group, window in enumerate(windows):
        words = np.stack([ids, positions + group * GROUP_STEP], axis=-1).astype("<u4")
        seen.append(words[-window:] if window else words)
    return _logits_of(seen)


def expected_tokens(
    prompt: list[int], count: int, *, ignore_eos: bool = True, windows: tuple[int, ...] = FULL
) -> list[int]:
    """Return the greedy continuation of `prompt`."""
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(int(logits_after(tokens, windows).argmax()))
        if tokens[-1] == EOS and not ignore_eos:
            break
    return tokens[len(prompt) :]


def _group(index: int, window: int, size: int) -> KVGroupSpec:
    return KVGroupSpec(
        kind="sliding" if window else "full",
        layers=(index,),
        block_size=size,
        block_bytes=size * WORD_BYTES,
        window=window,
        fingerprint=f"fake-{size}-{window}" if window else f"fake-{size}",
        layout=Layout(
            layers=(index,),
            window=window or None,
            num_layers=1,
            num_kv_heads=1,
            head_dim=1,
            dtype="float32",
            block_size=size,
        ),
    )


def _logits_of(seen: list[Words]) -> torch.Tensor:
    digest = hashlib.sha256(b"".join(np.ascontiguousarray(words).tobytes() for words in seen)).digest()[:8]
    noise = np.random.default_rng(int.from_bytes(digest, "little")).standard_normal(VOCAB_SIZE)
    return torch.from_numpy(noise.astype(np.float32) * 2)
