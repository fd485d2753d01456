"""A request's tokens do not depend on what the engine does around it: caching, chunks, asynchrony, preemption, company.

Everything runs through a whole core on the torch backend in float32. Each way of running is compared with one plain run, in
which each request is alone, its prompt is computed at once, nothing is cached, and no step is planned ahead.
"""

import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import msgspec
import pytest
import torch

from pdmesh.engine.messages import AddRequest
from pdmesh.engine.schedule import Schedule
from pdmesh.engine.torch_backend import TorchBackend
from pdmesh.models.source import DEMO_MODEL
from support.core_harness import CoreHarness, make_add
from support.tiny_models import make_tiny

BLOCK_SIZE = 16
NUM_TOKENS = 18
# Log-probabilities differ by rounding: a chunk's matrices have other shapes.
LOGPROB_TOLERANCE = 1e-3
Answer = dict[int, tuple[list[int], str]]
"""By choice: its tokens and how it ended."""


@dataclass(frozen=True, kw_only=True)
class Way:
    """How a load is run."""

    caching: bool = True
    chunk: int = 64
    is_async: bool = True
    preempts: bool = False
    """Before each step, one that runs loses its blocks."""
    arrivals: int = 0
    """Seed of the steps before which requests arrive; 0: all at once."""
    num_blocks: int = 256
    max_num_seqs: int = 16


ALONE = Way(caching=False, chunk=8192, is_async=False, max_num_seqs=1)
CHUNKS = (16, 64, 512, 8192)


def load(
    vocab_size: int, *, num_requests: int, longest: int, num_tokens: int
) -> list[tuple[list[int], dict[str, Any]]]:
    """Make prompts and options: greedy and seeded, with penalties and limits, some with a common beginning."""
    draw = random.Random(7)
    common = [draw.randrange(4, vocab_size) for _ in range(longest // 2)]
    kinds: list[dict[str, Any]] = [
        {},
        {"temperature": 0.8, "presence_penalty": 0.6, "frequency_penalty": 0.3},
        {"temperature": 1.2, "top_p": 0.9, "top_k": 40, "repetition_penalty": 1.3},
        {"temperature": 1.0, "min_p": 0.05, "n": 3},
        {"repetition_penalty": 1.2, "frequency_penalty": 0.4, "min_tokens": 5, "ignore_eos": False},
        {"temperature": 0.7, "logit_bias": {9: 4.0, 11: -50.0}, "bad_words_token_ids": [[5, 6]], "logprobs": 2},
        {"prompt_logprobs": 1, "logprobs": 0},
    ]
    found = []
    for index in range(num_requests):
        length = (1, 15, 17, 22, longest, 3 * BLOCK_SIZE, longest // 3)[index % 7]
        shared = common[:length] if index % 3 else []
        prompt = shared + [draw.randrange(4, vocab_size) for _ in range(length - len(shared))]
        found.append((prompt, {"max_tokens": num_tokens + index % 3, "seed": 100 + index} | kinds[index % len(kinds)]))
    return found


class Engine:
    """A core whose scheduler is disturbed as a `Way` says."""

    def __init__(self, model: str, way: Way) -> None:
        self.core = CoreHarness(
            backend=TorchBackend(1),
            model=model,
            block_size=BLOCK_SIZE,
            num_blocks=way.num_blocks,
            enable_prefix_caching=way.caching,
            is_async=way.is_async,
            max_num_batched_tokens=way.chunk,
            max_num_seqs=way.max_num_seqs,
            max_model_len=128,
        )
        self.num_forced = 0
        self._way = way
        self._draw = random.Random(way.arrivals)
        self._coming: list[AddRequest] = []
        self._schedule: Callable[[], Schedule] = self.core.scheduler.schedule
        self.core.scheduler.schedule = self._disturb  # type: ignore[method-assign]

    def run(self, adds: list[AddRequest]) -> dict[str, Answer]:
        self._coming = list(adds)
        if self._way.arrivals:
            self._draw.shuffle(self._coming)
            self.core.send(self._coming.pop())
        else:
            self.core.send(*self._coming)
            self._coming = []
        self.core.run()
        assert not self._coming
        assert self.core.num_used == 0
        return {add.request.request_id: self.answer(add) for add in adds}

    def answer(self, add: AddRequest) -> Answer:
        request_id = add.request.request_id
        return {
            choice: (self.core.tokens(request_id, choice), self.core.finish_reason(request_id, choice))
            for choice in add.request.choices
        }

    def _disturb(self) -> Schedule:
        state = self.core.scheduler.state
        # Someone must come while there is a step to come before.
        while self._coming and (self._draw.random() < 0.6 or not state.requests):
            self.core.scheduler.add(self._coming.pop())
        if self._way.preempts and state.running:
            state.preempt(self._draw.choice(state.running))
            self.num_forced += 1
        return self._schedule()


def adds_of(requests: list[tuple[list[int], dict[str, Any]]]) -> list[AddRequest]:
    return [make_add(prompt, f"r{index}", **options) for index, (prompt, options) in enumerate(requests)]


class Expected:
    """What one model says to a load, each request alone."""

    def __init__(self, model: str, vocab_size: int, **size: int) -> None:
        torch.set_num_threads(1)
        self.model = model
        self.adds = adds_of(load(vocab_size, **size))
        self.answers: dict[str, Answer] = {}
        self.deltas: dict[str, list[Any]] = {}
        for add in self.adds:
            engine = Engine(model, ALONE)
            self.answers |= engine.run([add])
            self.deltas[add.request.request_id] = engine.core.deltas_of(add.request.request_id)
            engine.core.close()

    def check(self, way: Way) -> Engine:
        """Run the load, and with caching once more, when all of it is cached."""
        engine = Engine(self.model, way)
        for turn in range(1 + way.caching):
            names = {add.request.request_id: f"{add.request.request_id}-{turn}" for add in self.adds}
            answers = engine.run([renamed(add, names[add.request.request_id]) for add in self.adds])
            for request_id, wanted in self.answers.items():
                assert answers[names[request_id]] == wanted, f"{request_id}, turn {turn}, {way}"
                found = logprobs_of(engine.core.deltas_of(names[request_id]))
                assert found == pytest.approx(logprobs_of(self.deltas[request_id]), abs=LOGPROB_TOLERANCE)
        hits = engine.core.scheduler.state.counters.prefix_cache_hits
        assert (hits > 0) == way.caching
        return engine


def renamed(add: AddRequest, request_id: str) -> AddRequest:
    return msgspec.structs.replace(add, request=msgspec.structs.replace(add.request, request_id=request_id))


def logprobs_of(deltas: list[Any]) -> list[float]:
    """Return the chosen tokens' log-probabilities, of the prompt and of the output."""
    listed = [
        each for delta in deltas for each in [*(delta.prompt_logprobs or []), *delta.logprobs] if each is not None
    ]
    return [each.logprobs[0] for each in listed]


@pytest.fixture(scope="module", params=["qwen3", "gemma3"])
def expected(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Expected:
    """One KV group of full attention; and three, two of them with a window."""
    folder = make_tiny(request.param, tmp_path_factory.mktemp(request.param))
    return Expected(str(folder), 300, num_requests=7, longest=100, num_tokens=NUM_TOKENS)


def test_the_load_has_something_to_say(expected: Expected) -> None:
    tokens = [tokens for answer in expected.answers.values() for tokens, _ in answer.values()]
    assert sum(len(set(each)) > 3 for each in tokens) > len(tokens) // 2
    three = expected.answers["r3"]
    assert len({tuple(tokens) for tokens, _ in three.values()}) == 3


@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("caching", [False, True], ids=["uncached", "cached"])
@pytest.mark.parametrize("chunk", CHUNKS)
def test_chunks(expected: Expected, chunk: int, caching: bool, is_async: bool) -> None:
    expected.check(Way(chunk=chunk, caching=caching, is_async=is_async))


@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("caching", [False, True], ids=["uncached", "cached"])
def test_preemption_before_every_step(expected: Expected, caching: bool, is_async: bool) -> None:
    engine = expected.check(Way(chunk=512, caching=caching, is_async=is_async, preempts=True))
    assert engine.num_forced >= NUM_TOKENS - 1


@pytest.mark.parametrize("seed", range(1, 5))
def test_arrivals_in_any_order_at_any_step(expected: Expected, seed: int) -> None:
    expected.check(Way(chunk=64, arrivals=seed, max_num_seqs=5))


@pytest.mark.parametrize("seed", range(1, 4))
def test_everything_at_once_in_a_pool_that_is_too_small(expected: Expected, seed: int) -> None:
    num_groups = 1 if "qwen3" in expected.model else 3
    way = Way(chunk=48, arrivals=seed, num_blocks=8 * num_groups, is_async=bool(seed % 2))
    engine = expected.check(replace(way, preempts=seed == 3, chunk=512 if seed == 3 else 48))
    assert engine.core.scheduler.state.counters.num_preemptions > 0


@pytest.mark.full
@pytest.mark.timeout(900)
def test_all_ways_with_the_demo_model() -> None:
    expected = Expected(DEMO_MODEL, 49_000, num_requests=7, longest=70, num_tokens=6)
    for chunk in CHUNKS:
        expected.check(Way(chunk=chunk))
    for caching in (False, True):
        for is_async in (False, True):
            expected.check(Way(caching=caching, is_async=is_async))
            expected.check(Way(caching=caching, is_async=is_async, chunk=512, preempts=True))
    for seed in range(1, 4):
        expected.check(Way(arrivals=seed, max_num_seqs=4))
