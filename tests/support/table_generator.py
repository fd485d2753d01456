"""A Generator whose next-token log-probabilities are a fixed float32 function of all tokens before; a vocabulary of a few."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from pdmesh.openai.generator import Generator, ModelCard, TokenRequest
from pdmesh.protocol.messages import ChoiceDelta, TokenLogprobs

Table = Callable[[list[int]], NDArray[np.float32]]


def random_table(seed: int, vocab_size: int, *, spread: float = 2.0) -> Table:
    """Logits drawn anew for every context, the same each time it is asked."""

    def logprobs(context: list[int]) -> NDArray[np.float32]:
        logits = np.random.default_rng([seed, *context]).normal(0, spread, vocab_size).astype(np.float32)
        shifted = logits - logits.max()
        return (shifted - np.log(np.exp(shifted).sum())).astype(np.float32)

    return logprobs


@dataclass(kw_only=True)
class TableGenerator(Generator):
    """Greedy, one token per request, as a beam search asks; remembers what it was asked."""

    table: Table
    vocab_size: int
    fail_at_step: int | None = None
    hang_at_step: int | None = None
    steps: list[list[TokenRequest]] = field(default_factory=list)
    """Requests by the number of tokens they continue."""
    num_running: int = 0

    async def card(self) -> ModelCard:
        return ModelCard(name="table", root="table", max_model_len=512, created_s=0, vocab_size=self.vocab_size)

    async def problem(self) -> str:
        return ""

    async def abort_choice(self, request_id: str, choice: int) -> None:
        raise AssertionError("a step has one token")

    async def generate(self, request: TokenRequest) -> AsyncIterator[ChoiceDelta]:
        if not self.steps or len(self.steps[-1][0].token_ids) != len(request.token_ids):
            self.steps.append([])
        self.steps[-1].append(request)
        number = len(self.steps) - 1
        request.trace.decode, request.trace.reason = "table-0", "direct"
        self.num_running += 1
        try:
            await asyncio.sleep(0)
            if self.hang_at_step == number:
                await asyncio.Event().wait()
            yield self._delta(request, number)
        finally:
            self.num_running -= 1

    def _delta(self, request: TokenRequest, number: int) -> ChoiceDelta:
        if self.fail_at_step == number:
            return ChoiceDelta(
                request_id=request.request_id, finish_reason="error", error_code="Overloaded", error_message="full"
            )
        logprobs = self.table(request.token_ids)
        order = np.argsort(-logprobs, kind="stable")[: request.sampling.logprobs]
        chosen = int(order[0])
        entry = TokenLogprobs(
            token_ids=[chosen, *map(int, order)],
            logprobs=[float(logprobs[chosen]), *map(float, logprobs[order])],
            rank=1,
        )
        return ChoiceDelta(
            request_id=request.request_id,
            token_ids=[chosen],
            logprobs=[entry],
            finish_reason="length",
            cached_tokens=len(request.token_ids) - 1,
        )
