"""The sampler against plain references, and the promise that a row depends on nothing but itself."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from pdmesh.engine.plan import NO_TOKEN, NewRow, StepPlan
from pdmesh.engine.rows import Rows
from pdmesh.engine.sampler import Sampler, Samples
from pdmesh.engine.step_logits import on_host
from pdmesh.protocol.messages import SamplingParams, ThinkingBudget
from pdmesh_kernels.sample_scan import Scanner
from support.scanner import scanner_or_skip

V = 50
EOS = frozenset({1})
MAX_LEN = 300
Floats = NDArray[np.float32]


@dataclass
class Case:
    """A sequence whose next token is asked for."""

    prompt: list[int]
    output: list[int]
    sampling: SamplingParams
    choice: int = 0

    @property
    def length(self) -> int:
        return len(self.prompt) + len(self.output)


def case(prompt: list[int], output: list[int] | None = None, choice: int = 0, **sampling: object) -> Case:
    fields = {"temperature": 0.0, "ignore_eos": True, "max_tokens": 100} | sampling
    return Case(prompt, output or [], SamplingParams(**fields), choice)  # type: ignore[arg-type]


class Batch:
    """Cases in rows of their own, from row 0 on."""

    scanner: ClassVar[Scanner | None] = None
    """Set by `draws`."""

    def __init__(self, *cases: Case) -> None:
        self.rows = Rows(len(cases), MAX_LEN, 1, 16, eos_token_ids=EOS)
        self.rows.apply(StepPlan(new=[_new_row(row, each) for row, each in enumerate(cases)]))
        self.lengths = np.array([each.length for each in cases])
        self._sampler = Sampler(self.rows, self.scanner)

    def sample(self, logits: Floats, best_ids: NDArray[np.int64] | None = None) -> Samples:
        """Sample in place, and go one token further."""
        samples = self._sampler.sample(logits, np.arange(len(self.lengths)), self.lengths, best_ids)
        self.lengths = self.lengths + 1
        return samples


@pytest.fixture(autouse=True, scope="module", params=["numpy", "library"])
def draws(request: pytest.FixtureRequest) -> Iterator[None]:
    """Every test runs with each way to draw."""
    Batch.scanner = scanner_or_skip() if request.param == "library" else None
    yield
    Batch.scanner = None


def _new_row(row: int, each: Case) -> NewRow:
    return NewRow(
        row=row,
        choice=each.choice,
        token_ids=np.array(each.prompt + each.output, dtype="<u4").tobytes(),
        num_prompt=len(each.prompt),
        sampling=each.sampling,
        wants_prompt_logprobs=False,
        blocks=[[]],
    )


def logits_for(*seeds: int, vocab_size: int = V) -> Floats:
    return np.stack([np.random.default_rng(seed).standard_normal(vocab_size).astype(np.float32) * 3 for seed in seeds])


def sample(logits: Floats, *cases: Case) -> list[int]:
    samples = Batch(*cases).sample(logits.copy())
    assert not samples.failures
    return samples.token_ids.tolist()


def test_greedy_takes_the_largest_and_of_equal_ones_the_first() -> None:
    logits = logits_for(1, 2, 3)
    logits[1, [4, 30]] = 99.0
    assert sample(logits, *(case([5]) for _ in range(3))) == logits.argmax(-1).tolist()
    assert logits.argmax(-1)[1] == 4


def test_tokens_are_in_the_rows_for_the_next_step() -> None:
    batch = Batch(case([5, 6]), case([7], [8, 9], temperature=1.0, seed=4))
    logits = logits_for(1, 2)
    tokens = batch.sample(logits).token_ids
    assert batch.rows.tokens[0, :4].tolist() == [5, 6, tokens[0], 0]
    assert batch.rows.tokens[1, :5].tolist() == [7, 8, 9, tokens[1], 0]


PARAMETERS = st.fixed_dictionaries(
    {
        "seed": st.integers(-(2**63), 2**63 - 1),
        "temperature": st.sampled_from([0.0, 0.05, 0.7, 1.0, 2.0]),
        "top_k": st.sampled_from([0, -1, 1, 3, V - 1, V + 5]),
        "top_p": st.sampled_from([1.0, 0.05, 0.5, 0.95]),
        "min_p": st.sampled_from([0.0, 0.1, 1.0]),
        "repetition_penalty": st.sampled_from([1.0, 1.3, 1e308]),
        "frequency_penalty": st.sampled_from([0.0, 0.4]),
        "presence_penalty": st.sampled_from([0.0, -0.6]),
        "min_tokens": st.sampled_from([0, 2]),
        "logit_bias": st.sampled_from([{}, {8: 5.0, 9: -100.0}]),
        "bad_words_token_ids": st.sampled_from([[], [[10], [7, 11]]]),
        "allowed_token_ids": st.sampled_from([None, list(range(5, 30))]),
        "logprobs": st.sampled_from([None, 0, 5]),
        "thinking": st.sampled_from([None, ThinkingBudget(budget=1, start_token_ids=[6], end_token_ids=[12, 13])]),
    }
)


@settings(max_examples=150, deadline=None)
@given(st.lists(PARAMETERS, min_size=1, max_size=7), st.booleans())
def test_a_row_gives_the_same_alone_and_in_any_batch(options: list[dict[str, object]], has_ties: bool) -> None:
    cases = [case([5, 6], [7], choice=index % 3, **each) for index, each in enumerate(options)]
    logits = logits_for(*range(len(cases)))
    if has_ties:
        logits = np.round(logits)
    together = Batch(*cases).sample(logits.copy())
    for index, each in enumerate(cases):
        alone = Batch(each).sample(logits[index : index + 1].copy())
        assert alone.token_ids[0] == together.token_ids[index]
        assert alone.logprobs.get(0) == together.logprobs.get(index)
        assert alone.failures.get(0) == together.failures.get(index)


@pytest.mark.parametrize("threads", [1, 2])
def test_neither_the_batch_nor_the_threads_change_a_large_row(threads: int) -> None:
    options: list[dict[str, object]] = [{}, {"top_k": 30}, {"top_p": 0.9}, {"min_p": 0.05}, {"logprobs": 20}]
    cases = [case([5], temperature=1.0, seed=index, **each) for index, each in enumerate(options)]
    logits = logits_for(*range(len(cases)), vocab_size=20_000)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        together = Batch(*cases).sample(logits.copy())
        alone = [Batch(each).sample(logits[index : index + 1].copy()) for index, each in enumerate(cases)]
    finally:
        torch.set_num_threads(before)
    assert together.token_ids.tolist() == [int(each.token_ids[0]) for each in alone]
    assert together.logprobs[4] == alone[4].logprobs[0]


def test_position_choice_and_seed_change_the_draw() -> None:
    logits = np.zeros((1, V), dtype=np.float32)
    options = {"temperature": 1.0, "seed": 1}
    cases = [
        case([5], **options),
        case([5, 6], **options),
        case([5], choice=1, **options),
        case([5], **(options | {"seed": 2})),
        case([5], **(options | {"seed": 3})),
    ]
    assert len({sample(logits, each)[0] for each in cases}) >= 4


def test_penalties_equal_a_plain_reference() -> None:
    prompt, output = [3, 4, 4, 9], [4, 7, 7, 7, 11]
    logits = logits_for(12)
    expected = logits[0].copy()
    for token in set(prompt + output):
        expected[token] = expected[token] / 1.3 if expected[token] > 0 else expected[token] * 1.3
    for token in set(output):
        expected[token] -= 0.4 * output.count(token) - 0.6
    Batch(case(prompt, output, repetition_penalty=1.3, frequency_penalty=0.4, presence_penalty=-0.6)).sample(logits)
    np.testing.assert_allclose(logits[0], expected, rtol=1e-6)


def test_counts_kept_token_by_token_equal_those_replayed() -> None:
    options = {"repetition_penalty": 1.3, "frequency_penalty": 0.4, "presence_penalty": 0.2}
    batch = Batch(case([3, 4], **options))
    # More different tokens than the counts have room for at first.
    output = [int(batch.sample(logits_for(step, vocab_size=1000)).token_ids[0]) for step in range(150)]
    assert len(set(output)) > 64
    edited, replayed = logits_for(99, vocab_size=1000), logits_for(99, vocab_size=1000)
    batch.sample(edited)
    Batch(case([3, 4], output, **options)).sample(replayed)
    assert np.array_equal(edited, replayed)


def test_allowed_ids_bias_and_bad_words() -> None:
    logits = np.zeros((1, V), dtype=np.float32)
    logits[0, 20], logits[0, 21], logits[0, 22] = 5.0, 4.0, 3.0
    assert sample(logits, case([5], allowed_token_ids=[30, 22])) == [22]
    assert sample(logits, case([5], logit_bias={40: 9.0, 20: -5.0})) == [40]
    assert sample(logits, case([5], bad_words_token_ids=[[20]])) == [21]
    words = [[8, 20], [9, 8, 21]]
    assert sample(logits, case([5], [9, 8], bad_words_token_ids=words)) == [22]
    assert sample(logits, case([5], [8], bad_words_token_ids=words)) == [21]
    # The prompt does not count as the beginning of a bad word.
    assert sample(logits, case([9, 8], bad_words_token_ids=words)) == [20]


def test_min_tokens_holds_back_eos_and_stop_ids() -> None:
    logits = np.zeros((1, V), dtype=np.float32)
    logits[0, 1], logits[0, 30], logits[0, 31] = 5.0, 4.0, 3.0
    options = {"min_tokens": 2, "stop_token_ids": [30], "ignore_eos": False}
    assert sample(logits, case([5], [6], **options)) == [31]
    assert sample(logits, case([5], [6, 6], **options)) == [1]
    assert sample(logits, case([5], [6], **(options | {"ignore_eos": True}))) == [1]


def test_bias_comes_before_penalties() -> None:
    logits = np.zeros((1, V), dtype=np.float32)
    logits[0, 7] = 4.0
    # (0 + 10) / 2 is above 4; 0 / 2 + 10 would be 10, and 7.5 tells the two apart.
    logits[0, 9] = 7.5
    assert sample(logits, case([8], logit_bias={8: 10.0}, repetition_penalty=2.0)) == [9]


@pytest.mark.parametrize("options", [{}, {"top_p": 0.5}, {"min_p": 0.5}, {"top_k": 2}])
@pytest.mark.parametrize("logit", [3.0, -3.0])
def test_logits_too_large_to_be_divided_are_still_told_apart(options: dict[str, float], logit: float) -> None:
    """A logit of 3e38 at a temperature of 0.01 was an error of the client's."""
    logits = np.full((1, V), -np.inf, dtype=np.float32)
    logits[0, 7], logits[0, 8] = logit, logit - 0.1
    extreme = {"repetition_penalty": 1e-38 if logit > 0 else 1e38, "temperature": 0.01}
    assert sample(logits, case([7, 8], **(extreme | options))) == [7]


def test_parameters_that_make_logits_infinite_end_their_row() -> None:
    logits = logits_for(5, 6)
    logits[0, 7] = 3.0
    samples = Batch(case([7], temperature=1.0, repetition_penalty=1e-300), case([7])).sample(logits)
    assert {index: failure.code for index, failure in samples.failures.items()} == {0: "InvalidRequest"}
    assert "overflow" in samples.failures[0].message


@pytest.mark.parametrize("options", [{}, {"top_p": 0.5}, {"top_k": 3}, {"min_p": 0.1}])
def test_extreme_logits_are_sampled_all_the_same(options: dict[str, float]) -> None:
    logits = np.full((1, 3000), -3e38, dtype=np.float32)
    logits[0, 5] = 3e38
    assert sample(logits, case([7], temperature=1.0, **options)) == [5]


def test_logprobs_are_of_the_model_before_any_edit() -> None:
    logits = logits_for(17)
    raw = torch.from_numpy(logits[0].copy()).log_softmax(-1)
    samples = Batch(case([5], temperature=0.5, seed=3, logprobs=3, logit_bias={8: 50.0})).sample(logits)
    assert samples.token_ids.tolist() == [8]
    top, told = raw.topk(3), samples.logprobs[0]
    assert told.token_ids == [8, *top.indices.tolist()]
    assert told.logprobs == pytest.approx([raw[8].item(), *top.values.tolist()], abs=1e-6)
    assert told.rank == int((raw >= raw[8]).sum())


def test_all_of_the_vocabulary_can_be_told() -> None:
    logits = logits_for(18)
    told = Batch(case([5], logprobs=V)).sample(logits).logprobs[0]
    assert told.token_ids[1:] == np.argsort(-logits[0], kind="stable").tolist()
    assert len(told.logprobs) == V + 1


@pytest.mark.parametrize("broken", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_broken_row_is_an_error_and_its_neighbours_are_not(broken: float, temperature: float) -> None:
    logits = logits_for(1, 2, 3)
    expected = logits.argmax(-1).tolist()
    if broken == -math.inf:
        logits[1] = broken
    else:
        logits[1, 7] = broken
    samples = Batch(case([5], logprobs=1), case([5], temperature=temperature, logprobs=1), case([5])).sample(logits)
    assert samples.token_ids.tolist() == [expected[0], NO_TOKEN, expected[2]]
    assert [index for index, failure in samples.failures.items() if failure.is_nan] == [1]
    assert list(samples.logprobs) == [0]


def test_logits_on_the_host_are_not_copied() -> None:
    tensor = torch.zeros(2, V)
    on_host(tensor).logits_RV[1, 3] = 7.0
    assert tensor[1, 3] == 7.0
    assert on_host(torch.zeros(V, 2).T).logits_RV.flags.c_contiguous


def test_largest_logits_that_the_backend_found_are_taken_and_minus_one_is_nan() -> None:
    logits = np.zeros((3, V), dtype=np.float32)
    logits[0, 7] = logits[1, 9] = 2.0
    logits[2, 4] = np.nan
    batch = Batch(*(case([5]) for _ in range(3)))
    # Not the largest: so the answer tells who was asked.
    found = np.array([3, 9, -1])
    samples = batch._sampler.sample(logits, np.arange(3), batch.lengths, found)
    assert samples.token_ids.tolist() == [3, 9, NO_TOKEN]
    assert set(samples.failures) == {2}
    plain = Batch(case([5]), case([5]))
    assert plain._sampler.sample(logits[:2], np.arange(2), plain.lengths, found[:2]).token_ids.tolist() == [3, 9]
    assert plain.rows.tokens[:2, 1].tolist() == [3, 9]


@pytest.mark.parametrize("best", [3.0, math.inf, -math.inf, math.nan])
def test_a_row_that_is_alone_is_sampled_like_one_of_many(best: float) -> None:
    logits = np.full((2, V), -math.inf if best == -math.inf else 1.0, dtype=np.float32)
    logits[:, 7] = best
    found = np.where(np.isnan(logits).any(axis=1), -1, logits.argmax(axis=1))
    alone, pair = Batch(case([2, 3])), Batch(case([2, 3]), case([2, 3]))
    one = alone.sample(logits[:1].copy(), found[:1].copy())
    two = pair.sample(logits.copy(), found.copy())
    assert one.token_ids.tolist() == two.token_ids[:1].tolist()
    assert one.failures == {0: two.failures[0]} if two.failures else not one.failures
    assert alone.rows.tokens[0].tolist() == pair.rows.tokens[0].tolist()
    assert alone.rows.is_plain[0] == pair.rows.is_plain[0]
