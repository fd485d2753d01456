"""Counter-based random numbers: Philox4x32-10, so that a token's noise depends on what it is, not on when it is drawn.

Salmon, Moraes, Dror, Shaw: "Parallel random numbers: as easy as 1, 2, 3" (SC 2011). The key is the request's seed; the
counter is (token id / 4, absolute position, choice index, purpose), and token id modulo 4 picks one of the four words.

All of it is numpy on the host: its 64-bit integer operations take a third of what torch's take on a CPU.
"""

import math
from collections.abc import Iterator
from enum import IntEnum
from typing import Any

import numpy as np
from numpy.typing import NDArray

NUM_ROUNDS = 10
MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
MASK32 = 0xFFFFFFFF
# Counters at a time: the five arrays of a round stay in the second-level cache, and each below the 128 KiB from which
# malloc asks the kernel for fresh pages (16384 counters took 2.6 times as long per counter).
CHUNK = 12288

Words = NDArray[np.uint64]
"""32-bit words, each in 64 bits, so that products fit."""
Integers = int | NDArray[np.int64]
"""One for all token ids, or one for each."""


class Purpose(IntEnum):
    """What a number is for; each has a stream of its own."""

    SAMPLE = 0


def gumbel_noise(
    seed: Integers,
    choice: Integers,
    position: Integers,
    token_ids: NDArray[np.int64],
    purpose: Purpose = Purpose.SAMPLE,
) -> NDArray[np.float64]:
    """Return standard Gumbel noise for each of `token_ids` (one-dimensional)."""
    return gumbel_of(token_words(seed, choice, position, token_ids, purpose))


def gumbel_noise_of_one(
    seed: int, choice: int, position: int, token_id: int, purpose: Purpose = Purpose.SAMPLE
) -> float:
    """Return the noise of a single token, to the last digit or two: for one, integers are faster than arrays."""
    words = philox4x32((token_id >> 2, _word(position), _word(choice), int(purpose)), _key(seed))
    return -math.log(-math.log((int(words[token_id & 3]) + 0.5) * 2.0**-32))


def gumbel_of(words: Words) -> NDArray[np.float64]:
    """Map 32-bit words to noise; all of it lies in -log(33 log 2) … 33 log 2, which is -3.14 … 22.88."""
    return -np.log(-np.log(to_unit(words)))


def to_unit(words: Words) -> NDArray[np.float64]:
    """Map 32-bit words to (0, 1): the middle of each of 2**32 equal parts; exact, never 0 or 1."""
    return (words.astype(np.float64) + 0.5) * 2.0**-32


def token_words(
    seed: Integers,
    choice: Integers,
    position: Integers,
    token_ids: NDArray[np.int64],
    purpose: Purpose = Purpose.SAMPLE,
) -> Words:
    """Return one 32-bit word for each of `token_ids` (one-dimensional)."""
    chosen = np.empty(len(token_ids), dtype=np.uint64)
    for first in range(0, len(token_ids), CHUNK):
        part = slice(first, first + CHUNK)
        ids = token_ids[part]
        fixed = (_word(value if isinstance(value, int) else value[part]) for value in (position, choice))
        key = _key(seed if isinstance(seed, int) else seed[part])
        words = philox4x32((ids.astype(np.uint64) >> np.uint64(2), *fixed, int(purpose)), key)
        chosen[part] = np.concatenate(words)[(ids & 3) * len(ids) + np.arange(len(ids))]
    return chosen


def words_of_all(
    seed: int, choice: int, position: int, vocab_size: int, purpose: Purpose = Purpose.SAMPLE
) -> Iterator[tuple[int, tuple[Words, ...]]]:
    """Yield the words of a whole vocabulary in chunks, four ids for each Philox call: a chunk's first id, a multiple of 4,
    and four arrays, whose entries i are those of ids first + 4 * i … first + 4 * i + 3."""
    num_calls = -(-vocab_size // 4)
    fixed, key = (_word(position), _word(choice), int(purpose)), _key(seed)
    for first in range(0, num_calls, CHUNK):
        calls = np.arange(first, min(first + CHUNK, num_calls), dtype=np.uint64)
        yield 4 * first, philox4x32((calls, *fixed), key)


def philox4x32(counter: tuple[Words | int, ...], key: tuple[Words | int, Words | int]) -> tuple[Words, ...]:
    """Return four words (0 … 2**32 - 1) for a counter of four words and a key of two.

    Each is an array or, for all alike, an integer; if all are, so are the results.
    """
    # Integers and arrays mix freely, so that what does not vary yet is computed once. Typed Any: mypy knows no such sum.
    c0: Any
    c1: Any
    c2: Any
    c3: Any
    c0, c1, c2, c3 = counter
    k0: Any
    k1: Any
    k0, k1 = key
    for _ in range(NUM_ROUNDS):
        product0, product1 = c0 * MULTIPLIERS[0], c2 * MULTIPLIERS[1]
        c0, c2 = product1 >> 32, product0 >> 32
        c0 ^= c1
        c2 ^= c3
        # A low half goes on with its high half still above it, which is dropped here, one round later.
        c0 &= MASK32
        c2 &= MASK32
        c0 ^= k0
        c2 ^= k1
        c1, c3 = product1, product0
        k0, k1 = (k0 + KEY_STEPS[0]) & MASK32, (k1 + KEY_STEPS[1]) & MASK32
    return c0, c1 & MASK32, c2, c3 & MASK32


def _key(seed: Integers) -> tuple[Words | int, Words | int]:
    if isinstance(seed, int):
        return seed & MASK32, (seed >> 32) & MASK32
    bits: Words = seed.astype(np.uint64)
    return bits & np.uint64(MASK32), bits >> np.uint64(32)


def _word(value: Integers) -> Words | int:
    return value & MASK32 if isinstance(value, int) else value.astype(np.uint64) & np.uint64(MASK32)
