"""A Runner over the fake backend, with the least of a scheduler: rows get fresh blocks and are stepped as a test says."""

import os
from collections.abc import Callable, Sequence

import numpy as np

from pdmesh.connector.pool import KVPool, PoolShape, create_pool_file, size_pool_file
from pdmesh.engine.backend import ProgressCallback
from pdmesh.engine.logits_processors import LogitsProcessor
from pdmesh.engine.plan import NO_BLOCK, NO_TOKEN, BlockUpdate, NewRow, StepPlan, StepResult
from pdmesh.engine.runner import Runner
from pdmesh.protocol.messages import SamplingParams
from support.fake_backend import EOS, FakeBackend


class RunnerHarness:
    """Knows of each row how many tokens it has and which are computed. Close it."""

    def __init__(
        self,
        *,
        num_rows: int = 8,
        max_model_len: int = 64,
        block_size: int = 4,
        windows: list[int] | None = None,
        processors: Sequence[LogitsProcessor] = (),
    ) -> None:
        self.backend = FakeBackend(block_size, windows)
        info = self.backend.load("", "auto", None, ProgressCallback())
        shape = PoolShape(256, info.groups[0].block_bytes)
        fd = create_pool_file("test")
        size_pool_file(fd, shape)
        self.pool = KVPool(fd, shape, writable=True)
        os.close(fd)
        # What was in memory before must never be read.
        self.pool.blocks[:] = 0xAB
        self.backend.bind(self.pool)
        self.block_size = block_size
        self.runner = Runner(
            self.backend,
            num_rows=num_rows,
            max_model_len=max_model_len,
            num_groups=len(info.groups),
            block_size=block_size,
            eos_token_ids=frozenset({EOS}),
            processors=processors,
        )
        self.plan = StepPlan()
        """What the next step begins with; a test may add to it."""
        self.lengths: dict[int, int] = {}
        self.computed: dict[int, int] = {}
        self.blocks: dict[int, list[list[int]]] = {}
        self._free = np.random.default_rng(0).permutation(256).tolist()

    def add(self, row: int, prompt: list[int], output: Sequence[int] = (), choice: int = 0, **sampling: object) -> None:
        """Give a row to a sequence, with blocks for what it has. Greedy unless told otherwise."""
        tokens = np.array([*prompt, *output], dtype="<u4")
        params = SamplingParams(**{"temperature": 0.0, "ignore_eos": True, "max_tokens": 100} | sampling)  # type: ignore[arg-type]
        self.blocks[row] = [self._take(len(tokens)) for _ in self.backend.windows]
        self.lengths[row], self.computed[row] = len(tokens), 0
        wants_prompt_logprobs = params.prompt_logprobs is not None
        self.plan.new.append(
            NewRow(
                row=row,
                choice=choice,
                token_ids=tokens.tobytes(),
                num_prompt=len(prompt),
                sampling=params,
                wants_prompt_logprobs=wants_prompt_logprobs,
                blocks=[list(table) for table in self.blocks[row]],
            )
        )

    def step(self, rows: dict[int, int], on_begin: Callable[[], None] | None = None) -> StepResult:
        """Compute so many tokens of each row; those that reach their end sample."""
        plan, self.plan = self.plan, StepPlan()
        for row, count in rows.items():
            start = self.computed[row]
            self._grow(plan, row, start + count)
            plan.rows.append(row)
            plan.starts.append(start)
            plan.counts.append(count)
            plan.samples.append(start + count == self.lengths[row])
            self.computed[row] = start + count
            self.lengths[row] += plan.samples[-1]
        return self.runner.run(plan, on_begin)

    def generate(self, rows: list[int], count: int) -> dict[int, list[int]]:
        """Compute what the rows have in one step, then one token per step, until each has `count` new ones."""
        outputs: dict[int, list[int]] = {row: [] for row in rows}
        for _ in range(count):
            result = self.step({row: self.lengths[row] - self.computed[row] for row in rows})
            assert not result.failures
            for row, token_id in zip(rows, result.token_ids, strict=True):
                assert token_id != NO_TOKEN
                outputs[row].append(token_id)
        return outputs

    def slide(self, row: int) -> None:
        """Let the blocks go that no window of the row needs any more; they are taken again at once."""
        for group, window in enumerate(self.backend.windows):
            table = self.blocks[row][group]
            for index in range(max(self.computed[row] - window + 1, 0) // self.block_size if window else 0):
                if table[index] != NO_BLOCK:
                    self._free.append(table[index])
                    self.plan.updates.append(BlockUpdate(row, group, index, [NO_BLOCK]))
                    table[index] = NO_BLOCK

    def close(self) -> None:
        self.backend.close()
        self.pool.close()

    def _grow(self, plan: StepPlan, row: int, num_tokens: int) -> None:
        for group, table in enumerate(self.blocks[row]):
            fresh = self._take(num_tokens - len(table) * self.block_size)
            if fresh:
                plan.updates.append(BlockUpdate(row, group, len(table), fresh))
                table += fresh

    def _take(self, num_tokens: int) -> list[int]:
        return [self._free.pop() for _ in range(-(-max(num_tokens, 0) // self.block_size))]
