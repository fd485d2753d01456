"""A backend whose KV is the token ids themselves, and whose logits are a hash of all KV that a row can see.

It really writes into the pool and reads back through the block tables, so that a wrong table, a block shared by mistake or a
copy that missed a byte gives other tokens than `expected_tokens`, which computes them from the ids alone.
"""

import hashlib

import numpy as np
import torch

from pdmesh.connector.pool import KVPool
from pdmesh.engine.backend import Backend, KVGroupSpec, ModelInfo, ProgressCallback, StepBatch

VOCAB_SIZE = 64
EOS = 1
WORD_BYTES = 8


class FakeBackend(Backend):
    """One KV group; 8 bytes per token: its id and its position, each plus one."""

    name = "fake"
    row_invariant = True
    default_block_size = 4

    def __init__(self, block_size: int = 4) -> None:
        self._block_size = block_size
        self._pool: KVPool | None = None
        self.steps: list[StepBatch] = []
        self.fail_next = 0
        self.nan_tokens: set[int] = set()
        """A row whose last token is one of these gets NaN logits."""

    def load(self, model: str, dtype: str, block_size: int | None, progress: ProgressCallback) -> ModelInfo:
        size = block_size or self._block_size
        group = KVGroupSpec(
            kind="full", layers=(0,), block_size=size, block_bytes=size * WORD_BYTES, fingerprint=f"fake-{size}"
        )
        return ModelInfo(
            fingerprint="fake-model",
            groups=(group,),
            max_model_len=4096,
            vocab_size=VOCAB_SIZE,
            eos_token_ids=(EOS,),
            dtype="float32",
        )

    def available_kv_bytes(self, fraction: float) -> int:
        return 1 << 20

    def bind(self, pool: KVPool) -> None:
        self._pool = pool

    def forward(self, batch: StepBatch) -> torch.Tensor:
        assert self._pool is not None
        self.steps.append(batch)
        if self.fail_next:
            self.fail_next -= 1
            raise RuntimeError("the device is on fire")
        words = self._pool.blocks.view("<u4").reshape(self._pool.shape.num_blocks, -1, 2)
        size = words.shape[1]
        for row, table in enumerate(batch.block_tables[0]):
            start, end = int(batch.query_start[row]), int(batch.query_start[row + 1])
            assert len(table) * size >= int(batch.context_len[row]) + end - start, "the table is too short"
            for index in range(start, end):
                position = int(batch.positions[index])
                assert position == int(batch.context_len[row]) + index - start
                words[table[position // size], position % size] = (int(batch.token_ids[index]) + 1, position + 1)
        rows = np.searchsorted(batch.query_start, batch.logits_index, side="right") - 1
        logits = torch.empty(len(batch.logits_index), VOCAB_SIZE)
        for place, (row, index) in enumerate(zip(rows.tolist(), batch.logits_index.tolist(), strict=True)):
            table, length = batch.block_tables[0][row], int(batch.positions[index]) + 1
            seen = words[table].reshape(-1, 2)[:length]
            logits[place] = _logits_of(seen)
            if int(batch.token_ids[index]) in self.nan_tokens:
                logits[place, 3] = torch.nan
        return logits

    def close(self) -> None:
        self._pool = None


def logits_after(token_ids: list[int]) -> torch.Tensor:
    """Return the logits that follow `token_ids`."""
    words = np.array([(token + 1, position + 1) for position, token in enumerate(token_ids)], dtype="<u4")
    return _logits_of(words)


def expected_tokens(prompt: list[int], count: int, *, ignore_eos: bool = True) -> list[int]:
    """Return the greedy continuation of `prompt`."""
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(int(logits_after(tokens).argmax()))
        if tokens[-1] == EOS and not ignore_eos:
            break
    return tokens[len(prompt) :]


def _logits_of(words: np.ndarray) -> torch.Tensor:
    seed = hashlib.sha256(np.ascontiguousarray(words).tobytes()).digest()[:8]
    noise = np.random.default_rng(int.from_bytes(seed, "little")).standard_normal(VOCAB_SIZE)
    return torch.from_numpy(noise.astype(np.float32) * 2)
