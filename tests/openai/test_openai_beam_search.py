"""Beam search as a search: against every sequence there is, against the plain definition, and what it asks of engines."""

from __future__ import annotations

import asyncio
import itertools
import math
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pdmesh.errors import InternalError, Overloaded
from pdmesh.openai.generator import TokenRequest
from pdmesh.openai.run.beam import Beam, BeamOptions, BeamSearch, run_beam_search
from pdmesh.protocol.messages import SamplingParams, TokenLogprobs
from support.table_generator import Table, TableGenerator, random_table

PROMPT = [1, 2]


def search(
    generator: TableGenerator,
    *,
    width: int,
    max_tokens: int,
    eos: frozenset[int] = frozenset({0}),
    length_penalty: float = 1.0,
    num_logprobs: int | None = None,
) -> list[Beam]:
    options = BeamOptions(
        width=width,
        max_tokens=max_tokens,
        eos_token_ids=eos,
        length_penalty=length_penalty,
        num_logprobs=num_logprobs,
    )
    return asyncio.run(run_beam_search(generator, token_request(), options))


def token_request() -> TokenRequest:
    return TokenRequest(request_id="r", token_ids=PROMPT, sampling=SamplingParams(), cache_salt="salt", priority=3)


def total(table: Table, tokens: tuple[int, ...]) -> float:
    return sum(float(table([*PROMPT, *tokens[:place]])[token]) for place, token in enumerate(tokens))


def every_end(vocab_size: int, max_tokens: int, eos: int) -> list[tuple[int, ...]]:
    """All sequences that end with EOS, or at max_tokens without one."""
    others = [token for token in range(vocab_size) if token != eos]
    whole = list(itertools.product(others, repeat=max_tokens))
    ended = [(*begin, eos) for length in range(max_tokens) for begin in itertools.product(others, repeat=length)]
    return ended + whole


@pytest.mark.parametrize("length_penalty", [0.0, 1.0, 2.0, -1.0])
@pytest.mark.parametrize("seed", range(3))
def test_a_search_wide_enough_finds_the_best_of_all_sequences(seed: int, length_penalty: float) -> None:
    vocab_size, max_tokens, width = 4, 4, 128
    table = random_table(seed, vocab_size)

    def score(tokens: tuple[int, ...]) -> float:
        num_tokens = len(PROMPT) + len(tokens) - (tokens[-1] == 0)
        return total(table, tokens) / num_tokens**length_penalty

    wanted = sorted(every_end(vocab_size, max_tokens, 0), key=score, reverse=True)[:width]
    found = search(
        TableGenerator(table=table, vocab_size=vocab_size),
        width=width,
        max_tokens=max_tokens,
        length_penalty=length_penalty,
    )
    assert [tuple(beam.token_ids) for beam in found] == wanted
    for beam in found:
        assert beam.cum_logprob == pytest.approx(total(table, tuple(beam.token_ids)), abs=1e-9)
        assert beam.finish_reason == ("stop" if beam.token_ids[-1] == 0 else "length")


@dataclass(frozen=True)
class Plain:
    """A hypothesis of the definition below."""

    tokens: tuple[int, ...]
    cum_logprob: float

    def score(self, eos: frozenset[int], length_penalty: float) -> float:
        num_tokens = len(PROMPT) + len(self.tokens) - (bool(self.tokens) and self.tokens[-1] in eos)
        return self.cum_logprob / num_tokens**length_penalty


def by_definition(
    table: Table, *, width: int, max_tokens: int, eos: frozenset[int], length_penalty: float
) -> list[tuple[int, ...]]:
    """The search without ending early: all steps, everything completed is kept."""
    live, completed = [Plain((), 0.0)], []
    for _ in range(max_tokens):
        made = []
        for beam in live:
            logprobs = table([*PROMPT, *beam.tokens])
            for token in np.argsort(-logprobs, kind="stable")[: 2 * width]:
                made.append(Plain((*beam.tokens, int(token)), beam.cum_logprob + float(logprobs[token])))
        completed += [beam for beam in made if beam.tokens[-1] in eos]
        going_on = [beam for beam in made if beam.tokens[-1] not in eos]
        live = sorted(going_on, key=lambda beam: (-beam.score(eos, length_penalty), beam.tokens))[:width]
    ranked = sorted([*completed, *live], key=lambda beam: (-beam.score(eos, length_penalty), beam.tokens))
    return [beam.tokens for beam in ranked[:width]]


@settings(max_examples=60)
@given(
    seed=st.integers(0, 10_000),
    width=st.integers(1, 4),
    max_tokens=st.integers(1, 7),
    vocab_size=st.integers(2, 7),
    eos=st.sampled_from([frozenset(), frozenset({0}), frozenset({0, 1})]),
    length_penalty=st.sampled_from([0.0, 0.5, 1.0, 3.0, -1.0, -3.0, 16.0]),
    spread=st.sampled_from([0.5, 2.0, 6.0]),
)
def test_ending_early_changes_nothing(
    seed: int,
    width: int,
    max_tokens: int,
    vocab_size: int,
    eos: frozenset[int],
    length_penalty: float,
    spread: float,
) -> None:
    table = random_table(seed, vocab_size, spread=spread)
    found = search(
        TableGenerator(table=table, vocab_size=vocab_size),
        width=width,
        max_tokens=max_tokens,
        eos=eos,
        length_penalty=length_penalty,
    )
    wanted = by_definition(table, width=width, max_tokens=max_tokens, eos=eos, length_penalty=length_penalty)
    assert [tuple(beam.token_ids) for beam in found] == wanted


def test_a_search_that_is_decided_asks_for_nothing_more() -> None:
    """After two steps both beams have ended, far ahead of what else there is."""

    def table(context: list[int]) -> np.ndarray:
        ends = len(context) > len(PROMPT)
        chances = [0.98, 0.01, 0.01] if ends else [0.001, 0.5, 0.499]
        return np.log(np.array(chances, dtype=np.float32))

    generator = TableGenerator(table=table, vocab_size=3)
    found = search(generator, width=2, max_tokens=100, length_penalty=0.0)
    assert [beam.token_ids for beam in found] == [[1, 0], [2, 0]]
    assert len(generator.steps) == 2


def test_a_search_goes_on_while_a_longer_beam_may_still_win() -> None:
    """The short answer is ahead of the live beam now, but not of what the length makes of it."""

    def table(context: list[int]) -> np.ndarray:
        chances = [0.6, 0.4] if len(context) == len(PROMPT) else [1e-6, 1 - 1e-6]
        return np.log(np.array(chances, dtype=np.float32))

    generator = TableGenerator(table=table, vocab_size=2)
    assert [beam.token_ids for beam in search(generator, width=1, max_tokens=10)] == [[1] * 10]
    assert [beam.token_ids for beam in search(generator, width=1, max_tokens=10, length_penalty=0.0)] == [[0]]


def test_ties_have_an_order_that_does_not_depend_on_what_comes_first() -> None:
    same = float(np.float32(math.log(0.25)))
    found = []
    for ids in ([3, 1, 2, 4], [4, 2, 1, 3]):
        one = BeamSearch(2, BeamOptions(width=2, max_tokens=2, eos_token_ids=frozenset()))
        while not one.done:
            one.advance([TokenLogprobs(token_ids=[ids[0], *ids], logprobs=[same] * 5, rank=1) for _ in one.live])
        found.append([beam.token_ids for beam in one.results()])
    assert found[0] == found[1] == [[1, 1], [1, 2]]


def test_steps_are_batches_of_single_tokens_that_find_each_other_in_the_prefix_cache() -> None:
    generator = TableGenerator(table=random_table(5, 6), vocab_size=6)
    request = token_request()
    options = BeamOptions(width=2, max_tokens=3, eos_token_ids=frozenset())
    beams = asyncio.run(run_beam_search(generator, request, options))
    assert [len(step) for step in generator.steps] == [1, 2, 2]
    every = [step for steps in generator.steps for step in steps]
    assert len({step.request_id for step in every}) == len(every)
    for step in every:
        assert (step.sampling.max_tokens, step.sampling.temperature, step.sampling.logprobs) == (1, 0.0, 4)
        assert (step.cache_salt, step.priority, step.beam_search) == ("salt", 3, True)
        assert 0 < step.deadline_s <= request.deadline_s
    # All but the first go to the engine that has the prompt.
    assert [step.preferred_engine for step in every] == ["", "table-0", "table-0", "table-0", "table-0"]
    assert (request.trace.reason, request.trace.decode) == ("beam_search", "table-0")
    assert request.trace.cached_tokens == len(PROMPT) - 1
    assert all(len(beam.token_ids) == 3 and not beam.logprobs for beam in beams)


def test_logprobs_are_kept_as_many_as_were_asked_for() -> None:
    table = random_table(7, 9)
    found = search(TableGenerator(table=table, vocab_size=9), width=1, max_tokens=3, num_logprobs=5)
    [beam] = found
    for place, position in enumerate(beam.logprobs):
        wanted = np.sort(table([*PROMPT, *beam.token_ids[:place]]))[::-1]
        assert position.token_ids[0] == beam.token_ids[place]
        assert position.logprobs[1:] == [float(value) for value in wanted[:5]]
        assert position.rank == 1 + list(wanted).index(np.float32(position.logprobs[0]))


def test_nan_is_an_error_and_impossible_tokens_are_no_candidates() -> None:
    def nan(context: list[int]) -> np.ndarray:
        return np.array([np.nan, np.nan], dtype=np.float32)

    with pytest.raises(InternalError, match="NaN"):
        search(TableGenerator(table=nan, vocab_size=2), width=1, max_tokens=2)

    def certain(context: list[int]) -> np.ndarray:
        return np.array([-np.inf, 0.0, -np.inf], dtype=np.float32)

    found = search(TableGenerator(table=certain, vocab_size=3), width=2, max_tokens=2)
    assert [beam.token_ids for beam in found] == [[1, 1]]


def test_a_failed_step_ends_the_search_and_aborts_the_others() -> None:
    generator = TableGenerator(table=random_table(1, 6), vocab_size=6, fail_at_step=1)
    with pytest.raises(Overloaded, match="full"):
        search(generator, width=2, max_tokens=5)
    assert generator.num_running == 0


def test_cancelling_a_search_aborts_its_step() -> None:
    generator = TableGenerator(table=random_table(1, 6), vocab_size=6, hang_at_step=2)

    async def run() -> None:
        options = BeamOptions(width=3, max_tokens=5, eos_token_ids=frozenset())
        task = asyncio.create_task(run_beam_search(generator, token_request(), options))
        while len(generator.steps) < 3 or len(generator.steps[2]) < 3:
            await asyncio.sleep(0)
        assert generator.num_running == 3
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(run())
    assert generator.num_running == 0
