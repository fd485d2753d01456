"""Truncation and draws against full sorts and full noise: shortcuts must not change one token."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from pdmesh.engine import draw as draw_module
from pdmesh.engine.draw import Stream, draw, find_candidates
from pdmesh.engine.philox import gumbel_noise
from pdmesh.engine.truncation import MAX_SORTED, top_ids, truncate
from pdmesh.protocol.messages import SamplingParams

Floats = NDArray[np.float32]


def normal(seed: int, size: int, spread: float) -> Floats:
    return (np.random.default_rng(seed).standard_normal(size) * spread).astype(np.float32)


def sorted_ids(logits: Floats) -> NDArray[np.int64]:
    """Larger logits first; of equal ones the lower id."""
    return np.argsort(-logits, kind="stable")


def reference(logits: Floats, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0) -> list[int]:
    """What may be drawn, by a full sort."""
    order = sorted_ids(logits)[: top_k or None]
    weights = np.exp(logits[order].astype(np.float64) - float(logits.max()))
    before = np.cumsum(weights) - weights
    kept = np.ones(len(order), dtype=bool)
    if top_p < 1.0:
        kept &= before < top_p * weights.sum()
    kept &= weights >= min_p
    return sorted(order[kept].tolist())


def drawn(logits: Floats, sampling: SamplingParams, stream: Stream) -> int:
    return draw([find_candidates(logits, int(logits.argmax()), sampling, stream)])[0]


def drawn_plainly(logits: Floats, sampling: SamplingParams, stream: Stream) -> int:
    """Noise for every token, and the largest sum of those that may be drawn."""
    scaled = logits / np.float32(sampling.temperature)
    noise = gumbel_noise(stream.seed, stream.choice, stream.position, np.arange(len(logits)))
    may = np.zeros(len(logits), dtype=bool)
    may[truncate(scaled, float(scaled.max()), top_k=sampling.top_k, top_p=sampling.top_p, min_p=sampling.min_p)] = True
    return int(np.where(may, scaled.astype(np.float64) + noise, -np.inf).argmax())


@pytest.mark.parametrize("spread", [0.01, 1.0, 6.0])
@pytest.mark.parametrize("size", [1, 2, 50, 5000])
@pytest.mark.parametrize(
    "options",
    [
        {"top_k": 1},
        {"top_k": 7},
        {"top_k": 4999},
        {"top_p": 1e-9},
        {"top_p": 0.3},
        {"top_p": 0.95},
        {"top_p": 0.9999},
        {"min_p": 0.03},
        {"min_p": 1.0},
        {"top_k": 40, "top_p": 0.8},
        {"top_k": 3000, "top_p": 0.97, "min_p": 0.01},
        {"top_p": 0.9, "min_p": 0.2},
    ],
)
def test_truncation_is_that_of_a_full_sort(options: dict[str, float], size: int, spread: float) -> None:
    logits = normal(size, size, spread)
    settled = {"top_k": 0, "top_p": 1.0, "min_p": 0.0} | options
    found = truncate(logits, float(logits.max()), **settled).tolist()  # type: ignore[arg-type]
    expected = reference(logits, **options)  # type: ignore[arg-type]
    assert found == sorted(found)
    # Rounding may move the border of the mass by a token.
    assert len(set(found) ^ set(expected)) <= ("top_p" in options)


@settings(max_examples=150, deadline=None)
@given(
    st.integers(0, 2**32),
    st.sampled_from([30, 3 * MAX_SORTED]),
    st.integers(1, 40),
    st.floats(0.01, 0.999),
    st.booleans(),
)
def test_equal_logits_are_taken_in_order_of_their_ids(
    seed: int, size: int, count: int, top_p: float, has_mask: bool
) -> None:
    generator = np.random.default_rng(seed)
    # As from a model in bfloat16: a few values, each many times.
    logits = generator.integers(0, 5, size).astype(np.float32)
    if has_mask:
        logits[generator.integers(0, size, size // 2)] = -np.inf
        logits[0] = 5.0
    order = sorted_ids(logits)
    assert top_ids(logits, float(logits.max()), count).tolist() == sorted(order[:count].tolist())
    kept = truncate(logits, float(logits.max()), top_k=0, top_p=top_p, min_p=0.0).tolist()
    assert kept == sorted(order[: len(kept)].tolist())
    assert len(set(kept) ^ set(reference(logits, top_p=top_p))) <= 1


def test_top_k_one_is_greedy_and_a_tiny_top_p_too() -> None:
    logits = np.zeros(100, dtype=np.float32)
    for options in ({"top_k": 1}, {"top_p": 1e-9}):
        sampling = SamplingParams(temperature=1.0, **options)  # type: ignore[arg-type]
        assert {drawn(logits, sampling, Stream(5, 0, position)) for position in range(20)} == {0}


@pytest.mark.parametrize("temperature", [0.05, 0.7, 1.0, 2.0])
@pytest.mark.parametrize("spread", [0.01, 1.0, 4.0, 30.0])
@pytest.mark.parametrize("options", [{}, {"top_p": 0.999}, {"top_k": 2500}])
def test_shortcuts_draw_what_noise_for_every_token_draws(
    options: dict[str, float], spread: float, temperature: float
) -> None:
    sampling = SamplingParams(temperature=temperature, **options)  # type: ignore[arg-type]
    for seed in range(12):
        logits, stream = normal(seed, 4099, spread), Stream(seed, seed % 3, seed * 7)
        assert drawn(logits, sampling, stream) == drawn_plainly(logits, sampling, stream)


def test_the_race_is_run_and_leaves_few() -> None:
    logits = normal(3, 20_000, 1.0)
    left = [
        len(find_candidates(logits, int(logits.argmax()), SamplingParams(), Stream(1, 0, i)).token_ids)
        for i in range(20)
    ]
    assert max(left) < 20


def test_masked_tokens_never_win() -> None:
    logits = np.full(9000, -np.inf, dtype=np.float32)
    logits[[17, 4000]] = [1.0, 1.5]
    for sampling in (SamplingParams(), SamplingParams(top_k=50), SamplingParams(top_p=0.9999)):
        assert {drawn(logits, sampling, Stream(2, 0, position)) for position in range(40)} == {17, 4000}


@pytest.mark.parametrize("word", [0, 1, 100, 1 << 8, 1 << 20, 1 << 26, 1 << 31, 2**32 - 2**20, 2**32 - 2, 2**32 - 1])
def test_the_limit_of_a_race_is_never_below_the_leaders_time(word: int) -> None:
    # The distance of small words rounds to 1 in float32, where it says nothing of the time.
    distance = float(np.float32(2**32 - 1 - word + 0.5) * np.float32(2.0**-32))
    time = -math.log((word + 0.5) * 2.0**-32)
    assert time <= draw_module._time_over_distance(distance) * distance * draw_module.RACE_MARGIN
    assert draw_module._time_over_distance(distance) < 23


def test_one_token_that_outweighs_all_others_wins_with_any_noise(monkeypatch: pytest.MonkeyPatch) -> None:
    # With everything in the race, a leader whose number rounds to 1 in float32 must not exclude the winner.
    monkeypatch.setattr(draw_module, "MAX_DIRECT_TOKENS", 0)
    monkeypatch.setattr(draw_module, "MAX_NOISE", 60.0)
    logits = np.array([0.0, -40.0, -41.0, -42.0, -43.0], dtype=np.float32)
    assert {drawn(logits, SamplingParams(), Stream(seed, 0, 0)) for seed in range(200)} == {0}


@pytest.mark.parametrize("max_shared", [1, 40, 10**9])
def test_rows_draw_the_same_alone_and_together(max_shared: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(draw_module, "MAX_SHARED_TOKENS", max_shared)
    options = [{}, {"top_k": 5}, {"top_p": 0.8}, {"min_p": 0.1}, {"temperature": 0.3}, {"top_k": 300, "top_p": 0.99}]
    rows = []
    for index in range(30):
        sampling = SamplingParams(**({"temperature": 1.0} | options[index % len(options)]))  # type: ignore[arg-type]
        logits = normal(index, [64, 3000, 5001][index % 3], 2.0)
        rows.append(find_candidates(logits, int(logits.argmax()), sampling, Stream(index - 15, index % 2, index * 3)))
    assert draw(rows) == [draw([row])[0] for row in rows]
    assert draw([]) == []


@pytest.mark.parametrize("options", [{}, {"top_k": 12}, {"top_p": 0.7}, {"min_p": 0.1}, {"temperature": 0.5}])
def test_draws_follow_the_distribution(options: dict[str, float]) -> None:
    logits, num_draws = normal(4, 50, 3.0), 1500
    sampling = SamplingParams(**({"temperature": 1.0} | options))  # type: ignore[arg-type]
    kept = {name: value for name, value in options.items() if name != "temperature"}
    scaled = logits / np.float32(sampling.temperature)
    expected = np.zeros(50)
    ids = reference(scaled, **kept)  # type: ignore[arg-type]
    expected[ids] = np.exp(scaled[ids] - scaled.max())
    expected /= expected.sum()
    rows = [
        find_candidates(logits, int(logits.argmax()), sampling, Stream(1, 0, position)) for position in range(num_draws)
    ]
    counts = np.bincount(draw(rows), minlength=50)
    assert not counts[expected == 0].any()
    # What is hardly ever expected counts as one.
    common = num_draws * expected >= 5
    seen = np.append(counts[common], counts[~common].sum())
    due = np.append(num_draws * expected[common], max(num_draws * expected[~common].sum(), 1.0))
    chi2 = ((seen - due) ** 2 / due).sum()
    freedom = len(seen) - 1
    # Five standard deviations of the chi-squared law.
    assert chi2 < freedom + 5 * math.sqrt(2 * freedom)
