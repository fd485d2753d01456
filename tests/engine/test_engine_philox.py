"""Philox4x32-10 against its authors' vectors, and the map from integers to noise."""

import numpy as np
import pytest

from pdmesh.engine.philox import (
    CHUNK,
    Purpose,
    gumbel_noise,
    gumbel_noise_of_one,
    gumbel_of,
    philox4x32,
    to_unit,
    token_words,
    words_of_all,
)

PI_COUNTER = (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344)
PI_KEY = (0xA4093822, 0x299F31D0)
PINNED_WORDS = [1721722462, 1103535780, 3309821461, 630600395, 420168162, 1689210537]
PINNED_NOISE = [0.08979482585507116, -0.30669362974680314, 1.3449616791225216]


@pytest.mark.parametrize("is_array", [True, False])
@pytest.mark.parametrize(
    ("counter", "key", "expected"),
    [
        ((0, 0, 0, 0), (0, 0), "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
        ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, "408f276d 41c83b0e a20bc7c6 6d5451fd"),
        (PI_COUNTER, PI_KEY, "d16cfe09 94fdcceb 5001e420 24126ea1"),
    ],
)
def test_philox_equals_the_published_vectors(
    counter: tuple[int, ...], key: tuple[int, int], expected: str, is_array: bool
) -> None:
    given = tuple(np.array([word], dtype=np.uint64) for word in counter) if is_array else counter
    words = philox4x32(given, key)
    assert " ".join(f"{int(word if isinstance(word, int) else word[0]):08x}" for word in words) == expected


def test_words_and_noise_are_those_of_every_release() -> None:
    # A seed gives the same tokens in all engines of a mesh, whatever their versions.
    assert [int(word) for word in token_words(-7, 3, 12345, np.arange(6))] == PINNED_WORDS
    assert gumbel_noise(-7, 3, 12345, np.arange(3)) == pytest.approx(PINNED_NOISE, rel=1e-14)


def test_unit_map_stays_inside_zero_and_one() -> None:
    words = np.array([0, 1, 2**31, 2**32 - 1], dtype=np.uint64)
    assert to_unit(words).tolist() == [0.5 * 2**-32, 1.5 * 2**-32, 0.5 + 0.5 * 2**-32, 1 - 0.5 * 2**-32]
    assert np.isfinite(gumbel_of(words)).all()


@pytest.mark.parametrize("vocab_size", [1, 2, 3, 4, 63, 1000, 4 * CHUNK + 5])
def test_words_of_a_subset_are_those_of_the_whole(vocab_size: int) -> None:
    whole = np.zeros(vocab_size + 3, dtype=np.uint64)
    for first, words in words_of_all(-7, 3, 12345, vocab_size):
        for lane, word in enumerate(words):
            whole[first + lane : first + 4 * len(word) : 4] = word
    ids = np.random.default_rng(0).permutation(vocab_size)
    assert np.array_equal(whole[ids], token_words(-7, 3, 12345, ids))


def test_words_of_many_streams_are_those_of_each() -> None:
    generator = np.random.default_rng(1)
    seeds = generator.integers(-(2**63), 2**63 - 1, 40)
    choices, positions, ids = (generator.integers(0, 100_000, 40) for _ in range(3))
    together = token_words(seeds, choices, positions, ids)
    fields = zip(seeds.tolist(), choices.tolist(), positions.tolist(), ids.tolist(), strict=True)
    alone = [int(token_words(seed, choice, position, np.array([i]))[0]) for seed, choice, position, i in fields]
    assert together.tolist() == alone


def test_noise_of_one_is_that_of_many() -> None:
    noise = gumbel_noise(2**62, 1, 77, np.arange(50))
    assert [gumbel_noise_of_one(2**62, 1, 77, i) for i in range(50)] == pytest.approx(noise.tolist(), rel=1e-12)


def test_noise_differs_by_seed_choice_position_and_token() -> None:
    ids = np.arange(8)
    base = token_words(1, 0, 10, ids, Purpose.SAMPLE)
    others = [
        token_words(2, 0, 10, ids, Purpose.SAMPLE),
        token_words(1 + (1 << 32), 0, 10, ids, Purpose.SAMPLE),
        token_words(1, 1, 10, ids, Purpose.SAMPLE),
        token_words(1, 0, 11, ids, Purpose.SAMPLE),
        token_words(1, 0, 10, ids + 8, Purpose.SAMPLE),
    ]
    assert all((base != other).all() for other in others)


def test_gumbel_noise_has_the_mean_and_variance_of_its_law() -> None:
    noise = gumbel_noise(11, 0, 0, np.arange(200_000))
    assert noise.mean() == pytest.approx(0.5772, abs=0.01)
    assert noise.var() == pytest.approx(1.6449, abs=0.03)
