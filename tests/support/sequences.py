"""Drives a backend directly, as the core would: sequences with shuffled blocks in every KV group, rows of any length."""

from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray

from pdmesh.connector.pool import KVPool, PoolShape, create_pool_file, size_pool_file
from pdmesh.engine.backend import KVGroupSpec, ModelInfo, ProgressCallback, StepBatch
from pdmesh.engine.torch_backend import TorchBackend

NO_BLOCK = -1


@dataclass
class Sequence:
    """Tokens whose KV is or will be in the pool."""

    token_ids: list[int]
    num_computed: int = 0
    blocks: list[list[int]] = field(default_factory=list)
    """By group; NO_BLOCK where a window has passed."""


class LoadedBackend:
    """A TorchBackend on one thread with a pool of its own. Close it."""

    def __init__(
        self,
        model: str,
        *,
        dtype: str = "float32",
        block_size: int = 16,
        num_blocks: int = 128,
        drops_blocks: bool = False,
    ) -> None:
        """With `drops_blocks` what a window has passed is freed before each step, and filled with NaN."""
        self.backend = TorchBackend(1)
        self.info: ModelInfo = self.backend.load(model, dtype, block_size, ProgressCallback())
        self.block_size = block_size
        shape = PoolShape(num_blocks, self.info.groups[0].block_bytes)
        fd = create_pool_file("test")
        size_pool_file(fd, shape)
        self.pool = KVPool(fd, shape, writable=True)
        self.backend.bind(self.pool)
        self._drops_blocks = drops_blocks
        self._free = np.random.default_rng(0).permutation(num_blocks).tolist()

    def step(self, rows: list[tuple[Sequence, int]], *, all_logits: bool = True) -> torch.Tensor:
        """Compute the next `count` tokens of each sequence; logits of all tokens, or of each row's last."""
        counts = [count for _, count in rows]
        for sequence, count in rows:
            sequence.blocks = sequence.blocks or [[] for _ in self.info.groups]
            for group, blocks in zip(self.info.groups, sequence.blocks, strict=True):
                if self._drops_blocks:
                    self._drop(group, blocks, sequence.num_computed)
                while len(blocks) * self.block_size < sequence.num_computed + count:
                    blocks.append(self._free.pop())
        ids = [sequence.token_ids[sequence.num_computed : sequence.num_computed + count] for sequence, count in rows]
        positions = [np.arange(sequence.num_computed, sequence.num_computed + count) for sequence, count in rows]
        starts = np.cumsum([0, *counts])
        batch = StepBatch(
            token_ids=np.concatenate(ids).astype(np.int64),
            positions=np.concatenate(positions),
            query_start=starts,
            context_len=np.array([sequence.num_computed for sequence, _ in rows]),
            block_tables=[
                as_table([sequence.blocks[group] for sequence, _ in rows]) for group in range(len(self.info.groups))
            ],
            logits_index=np.arange(starts[-1]) if all_logits else starts[1:] - 1,
        )
        for sequence, count in rows:
            sequence.num_computed += count
        return self.backend.forward(batch)

    def greedy(self, prompt: list[int], num_tokens: int) -> list[int]:
        """Return the tokens of highest logit, one by one, after a prompt computed at once."""
        sequence = Sequence(list(prompt))
        logits = self.step([(sequence, len(prompt))], all_logits=False)
        while True:
            sequence.token_ids.append(int(logits[0].argmax()))
            if len(sequence.token_ids) == len(prompt) + num_tokens:
                self.free(sequence)
                return sequence.token_ids[len(prompt) :]
            logits = self.step([(sequence, 1)])

    def free(self, sequence: Sequence) -> None:
        for blocks in sequence.blocks:
            self._free += [block for block in blocks if block != NO_BLOCK]

    def _drop(self, group: KVGroupSpec, blocks: list[int], num_computed: int) -> None:
        if not group.window:
            return
        for index in range(max(num_computed + 1 - group.window, 0) // self.block_size):
            if blocks[index] != NO_BLOCK:
                # 0xFF… is NaN in every float type.
                self.pool.blocks[blocks[index]] = 0xFF
                self._free.append(blocks[index])
                blocks[index] = NO_BLOCK

    def close(self) -> None:
        self.backend.close()
        self.pool.close()


def as_table(rows: list[list[int]]) -> NDArray[np.int32]:
    """Block lists as an array, padded with NO_BLOCK."""
    table = np.full((len(rows), max(len(row) for row in rows)), NO_BLOCK, dtype=np.int32)
    for index, row in enumerate(rows):
        table[index, : len(row)] = row
    return table
