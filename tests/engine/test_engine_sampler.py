"""The sampler against plain references, and the promise that a row depends on nothing but itself."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pdmesh.engine.request import Request, Sequence
from pdmesh.engine.sampler import Sampler, _truncate
from pdmesh.protocol.messages import SamplingParams
from support.core_harness import make_add

V = 50
EOS = frozenset({1})


def sequence_of(prompt: list[int], output: list[int] | None = None, choice: int = 0, **sampling: object) -> Sequence:
    add = make_add(prompt, choices=[choice], emitted=[output or []], **({"max_tokens": 100} | sampling))
    return Request(add, 1, 1).lead


def logits_for(*seeds: int, vocab_size: int = V) -> torch.Tensor:
    return torch.stack([torch.randn(vocab_size, generator=torch.Generator().manual_seed(seed)) * 3 for seed in seeds])


def sample(logits: torch.Tensor, *sequences: Sequence) -> list[int]:
    results = Sampler(EOS).sample(logits.clone(), list(sequences))
    assert all(result.error is None for result in results)
    return [result.token_id for result in results]


def test_greedy_takes_the_largest() -> None:
    logits = logits_for(1, 2, 3)
    assert sample(logits, *(sequence_of([5]) for _ in range(3))) == logits.argmax(-1).tolist()


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"top_k": 5},
        {"top_p": 0.7},
        {"min_p": 0.1},
        {"top_k": 20, "top_p": 0.9, "min_p": 0.02},
        {"temperature": 0.5},
    ],
)
def test_draws_follow_the_distribution(options: dict[str, float]) -> None:
    logits = logits_for(4)
    expected = reference_distribution(logits[0], **options)
    counts, num_draws = torch.zeros(V), 1000
    sequence = sequence_of([5], seed=1, **({"temperature": 1.0} | options))
    sampler = Sampler(frozenset())
    for _ in range(num_draws):
        counts[sampler.sample(logits.clone(), [sequence])[0].token_id] += 1
        sequence.tokens.append(0)
    assert not counts[expected == 0].any()
    kept = expected > 0
    chi2 = ((counts - num_draws * expected)[kept] ** 2 / (num_draws * expected)[kept]).sum().item()
    freedom = int(kept.sum()) - 1
    # Five standard deviations of the chi-squared law.
    assert chi2 < freedom + 5 * math.sqrt(2 * freedom)


def reference_distribution(
    logits: torch.Tensor, temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0
) -> torch.Tensor:
    """The same by a full sort, step by step."""
    scaled = logits / temperature
    order = scaled.argsort(descending=True)
    keep = torch.ones(V, dtype=torch.bool)
    if top_k:
        keep[order[top_k:]] = False
    probabilities = torch.where(keep, scaled, -torch.inf).softmax(-1)
    before = probabilities[order].cumsum(-1) - probabilities[order]
    if top_p < 1:
        keep[order[before >= top_p]] = False
    keep &= probabilities >= min_p * probabilities.max()
    return torch.where(keep, scaled, -torch.inf).softmax(-1)


@pytest.mark.parametrize("top_p", [0.01, 0.3, 0.95, 0.9999])
@pytest.mark.parametrize("spread", [0.01, 5.0])
def test_the_nucleus_is_that_of_a_full_sort(top_p: float, spread: float) -> None:
    # 3000 nearly equal logits reach beyond the first look, steep ones do not.
    logits = torch.randn(3000, generator=torch.Generator().manual_seed(0)) * spread
    truncated = _truncate(logits, SamplingParams(top_p=top_p))
    assert truncated is not None
    probabilities, order = logits.double().softmax(-1).sort(descending=True)
    count = max(int((probabilities.cumsum(-1) - probabilities < top_p).sum()), 1)
    # Rounding may move the border by a token.
    assert abs(len(truncated[1]) - count) <= 1
    assert set(order[: count - 1].tolist()) <= set(truncated[1].tolist())


@settings(max_examples=40, deadline=None)
@given(
    st.integers(-(2**63), 2**63 - 1),
    st.floats(0.05, 2.0),
    st.integers(0, V + 5),
    st.floats(0.05, 1.0),
    st.floats(0.0, 0.5),
    st.integers(0, 7),
)
def test_a_row_gives_the_same_alone_and_in_any_batch(
    seed: int, temperature: float, top_k: int, top_p: float, min_p: float, place: int
) -> None:
    options = {"seed": seed, "temperature": temperature, "top_k": top_k, "top_p": top_p, "min_p": min_p}
    row = logits_for(9)
    [alone] = sample(row, sequence_of([5, 6], [7], **options))
    others = [sequence_of([4], temperature=1.0, seed=index, presence_penalty=0.1) for index in range(7)]
    other_rows = logits_for(*range(7))
    batch = torch.cat([other_rows[:place], row, other_rows[place:]])
    sequences = [*others[:place], sequence_of([5, 6], [7], **options), *others[place:]]
    assert sample(batch, *sequences)[place] == alone


def test_position_choice_and_seed_change_the_draw() -> None:
    logits = torch.zeros(1, V)
    options = {"temperature": 1.0, "seed": 1}
    draws = {
        sample(logits, sequence)[0]
        for sequence in [
            sequence_of([5], **options),
            sequence_of([5, 6], **options),
            sequence_of([5], choice=1, **options),
            sequence_of([5], **(options | {"seed": 2})),
            sequence_of([5], **(options | {"seed": 3})),
        ]
    }
    assert len(draws) >= 4


def test_penalties_equal_a_plain_reference() -> None:
    prompt, output = [3, 4, 4, 9], [4, 7, 7, 7, 11]
    sequence = sequence_of(prompt, output, repetition_penalty=1.3, frequency_penalty=0.4, presence_penalty=-0.6)
    logits = logits_for(12)
    expected = logits[0].clone()
    for token in set(prompt + output):
        expected[token] = expected[token] / 1.3 if expected[token] > 0 else expected[token] * 1.3
    for token in set(output):
        expected[token] -= 0.4 * output.count(token) - 0.6
    edited = logits.clone()
    Sampler(EOS).sample(edited, [sequence])
    torch.testing.assert_close(edited[0], expected)


def test_counts_kept_token_by_token_equal_those_replayed() -> None:
    options = {"repetition_penalty": 1.3, "frequency_penalty": 0.4, "presence_penalty": 0.2}
    running, sampler = sequence_of([3, 4], **options), Sampler(EOS)
    for step in range(80):
        token = sampler.sample(logits_for(step), [running])[0].token_id
        running.tokens.append(token)
    output = running.tokens.view(2, running.num_tokens).tolist()
    edited, replayed = logits_for(99), logits_for(99)
    sampler.sample(edited, [running])
    sampler.sample(replayed, [sequence_of([3, 4], output, **options)])
    assert torch.equal(edited, replayed)


def test_allowed_ids_bias_and_bad_words() -> None:
    logits = torch.zeros(1, V)
    logits[0, 20], logits[0, 21], logits[0, 22] = 5.0, 4.0, 3.0
    assert sample(logits, sequence_of([5], allowed_token_ids=[30, 22])) == [22]
    assert sample(logits, sequence_of([5], logit_bias={40: 9.0, 20: -5.0})) == [40]
    assert sample(logits, sequence_of([5], bad_words_token_ids=[[20]])) == [21]
    words = [[8, 20], [9, 8, 21]]
    assert sample(logits, sequence_of([5], [9, 8], bad_words_token_ids=words)) == [22]
    assert sample(logits, sequence_of([5], [8], bad_words_token_ids=words)) == [21]
    # The prompt does not count as the beginning of a bad word.
    assert sample(logits, sequence_of([9, 8], bad_words_token_ids=words)) == [20]


def test_min_tokens_holds_back_eos_and_stop_ids() -> None:
    logits = torch.zeros(1, V)
    logits[0, 1], logits[0, 30], logits[0, 31] = 5.0, 4.0, 3.0
    options = {"min_tokens": 2, "stop_token_ids": [30], "ignore_eos": False}
    assert sample(logits, sequence_of([5], [6], **options)) == [31]
    assert sample(logits, sequence_of([5], [6, 6], **options)) == [1]
    assert sample(logits, sequence_of([5], [6], **(options | {"ignore_eos": True}))) == [1]


def test_logprobs_are_of_the_model_before_any_edit() -> None:
    logits = logits_for(17)
    raw = logits[0].log_softmax(-1)
    sequence = sequence_of([5], temperature=0.5, seed=3, logprobs=3, logit_bias={8: 50.0})
    [result] = Sampler(EOS).sample(logits.clone(), [sequence])
    assert result.token_id == 8
    assert result.logprobs is not None
    top = raw.topk(3)
    assert result.logprobs.token_ids == [8, *top.indices.tolist()]
    assert result.logprobs.logprobs == pytest.approx([raw[8].item(), *top.values.tolist()], abs=1e-6)
    assert result.logprobs.rank == int((raw >= raw[8]).sum())


@pytest.mark.parametrize("broken", [math.nan, math.inf, -math.inf])
def test_a_broken_row_is_an_error_and_its_neighbours_are_not(broken: float) -> None:
    logits = logits_for(1, 2, 3)
    expected = logits.argmax(-1).tolist()
    if broken == -math.inf:
        logits[1] = broken
    else:
        logits[1, 7] = broken
    results = Sampler(EOS).sample(logits, [sequence_of([5], logprobs=1) for _ in range(3)])
    assert [result.is_nan for result in results] == [False, True, False]
    assert [results[0].token_id, results[2].token_id] == [expected[0], expected[2]]
