"""Philox4x32-10 against its authors' vectors, and the map from integers to noise."""

import pytest
import torch

from pdmesh.engine.philox import Purpose, gumbel_noise, gumbel_noise_of_all, philox4x32, to_unit, token_words

PI_COUNTER = (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344)
PI_KEY = (0xA4093822, 0x299F31D0)


@pytest.mark.parametrize(
    ("counter", "key", "expected"),
    [
        ((0, 0, 0, 0), (0, 0), "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
        ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, "408f276d 41c83b0e a20bc7c6 6d5451fd"),
        (PI_COUNTER, PI_KEY, "d16cfe09 94fdcceb 5001e420 24126ea1"),
    ],
)
def test_philox_equals_the_published_vectors(counter: tuple[int, ...], key: tuple[int, int], expected: str) -> None:
    words = philox4x32(tuple(torch.tensor([word]) for word in counter), key)
    assert " ".join(f"{int(word):08x}" for word in words) == expected


def test_unit_map_stays_inside_zero_and_one() -> None:
    units = to_unit(torch.tensor([0, 1, 2**31, 2**32 - 1]))
    assert units.tolist() == [0.5 * 2**-32, 1.5 * 2**-32, 0.5 + 0.5 * 2**-32, 1 - 0.5 * 2**-32]
    assert torch.isfinite(-torch.log(-torch.log(units))).all()


@pytest.mark.parametrize("vocab_size", [1, 2, 3, 4, 63, 1000])
def test_noise_of_a_subset_is_that_of_the_whole(vocab_size: int) -> None:
    whole = gumbel_noise_of_all(-7, 3, 12345, vocab_size, torch.device("cpu"))
    ids = torch.randperm(vocab_size)
    assert torch.equal(whole[ids], gumbel_noise(-7, 3, 12345, ids))


def test_noise_differs_by_seed_choice_position_and_token() -> None:
    ids = torch.arange(8)
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
    noise = gumbel_noise_of_all(11, 0, 0, 200_000, torch.device("cpu"))
    assert noise.mean().item() == pytest.approx(0.5772, abs=0.01)
    assert noise.var().item() == pytest.approx(1.6449, abs=0.03)
