"""Drives a backend directly, as the core would: sequences with shuffled blocks, rows of any length in one step."""

from dataclasses import dataclass, field

import numpy as np
import torch

from pdmesh.connector.pool import KVPool, PoolShape, create_pool_file, size_pool_file
from pdmesh.engine.backend import ModelInfo, ProgressCallback, StepBatch
from pdmesh.engine.torch_backend import TorchBackend


@dataclass
class Sequence:
    """Tokens whose KV is or will be in the pool."""

    token_ids: list[int]
    num_computed: int = 0
    blocks: list[int] = field(default_factory=list)


class LoadedBackend:
    """A TorchBackend on one thread with a pool of its own. Close it."""

    def __init__(self, model: str, *, dtype: str = "float32", block_size: int = 16, num_blocks: int = 64) -> None:
        self.backend = TorchBackend(1)
        self.info: ModelInfo = self.backend.load(model, dtype, block_size, ProgressCallback())
        self.block_size = block_size
        shape = PoolShape(num_blocks, self.info.groups[0].block_bytes)
        fd = create_pool_file("test")
        size_pool_file(fd, shape)
        self.pool = KVPool(fd, shape, writable=True)
        self.backend.bind(self.pool)
        self._free = np.random.default_rng(0).permutation(num_blocks).tolist()

    def step(self, rows: list[tuple[Sequence, int]], *, all_logits: bool = True) -> torch.Tensor:
        """Compute the next `count` tokens of each sequence; logits of all tokens, or of each row's last."""
        counts = [count for _, count in rows]
        for sequence, count in rows:
            while len(sequence.blocks) * self.block_size < sequence.num_computed + count:
                sequence.blocks.append(self._free.pop())
        ids = [sequence.token_ids[sequence.num_computed : sequence.num_computed + count] for sequence, count in rows]
        positions = [np.arange(sequence.num_computed, sequence.num_computed + count) for sequence, count in rows]
        starts = np.cumsum([0, *counts])
        batch = StepBatch(
            token_ids=np.concatenate(ids).astype(np.int64),
            positions=np.concatenate(positions),
            query_start=starts,
            context_len=np.array([sequence.num_computed for sequence, _ in rows]),
            block_tables=[[list(sequence.blocks) for sequence, _ in rows]],
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
        self._free += sequence.blocks

    def close(self) -> None:
        self.backend.close()
        self.pool.close()
