"""Counter-based random numbers: Philox4x32-10, so that a token's noise depends on what it is, not on when it is drawn.

Salmon, Moraes, Dror, Shaw: "Parallel random numbers: as easy as 1, 2, 3" (SC 2011). The key is the request's seed; the
counter is (token id / 4, absolute position, choice index, purpose), and token id modulo 4 picks one of the four words.
"""

from enum import IntEnum

import torch

NUM_ROUNDS = 10
MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
MASK32 = 0xFFFFFFFF


class Purpose(IntEnum):
    """What a number is for; each has a stream of its own."""

    SAMPLE = 0


def gumbel_noise(
    seed: int, choice: int, position: int, token_ids: torch.Tensor, purpose: Purpose = Purpose.SAMPLE
) -> torch.Tensor:
    """Return standard Gumbel noise, float64, for each id in `token_ids` (int64, any shape, any device)."""
    words = token_words(seed, choice, position, token_ids, purpose)
    return -torch.log(-torch.log(to_unit(words)))


def gumbel_noise_of_all(
    seed: int, choice: int, position: int, vocab_size: int, device: torch.device, purpose: Purpose = Purpose.SAMPLE
) -> torch.Tensor:
    """Return what `gumbel_noise` gives for ids 0 … vocab_size - 1, four ids per Philox call."""
    groups = torch.arange(-(-vocab_size // 4), device=device)
    words = torch.stack(philox4x32(_counter(groups, position, choice, purpose), _key(seed)), dim=-1)
    return -torch.log(-torch.log(to_unit(words.reshape(-1)[:vocab_size])))


def token_words(seed: int, choice: int, position: int, token_ids: torch.Tensor, purpose: Purpose) -> torch.Tensor:
    """Return one 32-bit word (as int64) for each token id."""
    words = torch.stack(philox4x32(_counter(token_ids >> 2, position, choice, purpose), _key(seed)), dim=-1)
    return words.gather(-1, (token_ids & 3).unsqueeze(-1)).squeeze(-1)


def to_unit(words: torch.Tensor) -> torch.Tensor:
    """Map 32-bit words to float64 in (0, 1): the middle of each of 2**32 equal parts; exact, never 0 or 1."""
    return (words.to(torch.float64) + 0.5) * 2.0**-32


def philox4x32(counter: tuple[torch.Tensor, ...], key: tuple[int, int]) -> tuple[torch.Tensor, ...]:
    """Return four words (int64 in 0 … 2**32 - 1) for a counter of four words of equal shape and a key of two."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(NUM_ROUNDS):
        # The product wraps around in int64; its bit pattern is still that of the unsigned one.
        low_product, high_product = c0 * MULTIPLIERS[0], c2 * MULTIPLIERS[1]
        c0, c1, c2, c3 = (
            ((high_product >> 32) & MASK32) ^ c1 ^ k0,
            high_product & MASK32,
            ((low_product >> 32) & MASK32) ^ c3 ^ k1,
            low_product & MASK32,
        )
        k0, k1 = (k0 + KEY_STEPS[0]) & MASK32, (k1 + KEY_STEPS[1]) & MASK32
    return c0, c1, c2, c3


def _key(seed: int) -> tuple[int, int]:
    return seed & MASK32, (seed >> 32) & MASK32


def _counter(groups: torch.Tensor, position: int, choice: int, purpose: Purpose) -> tuple[torch.Tensor, ...]:
    fixed = (torch.full_like(groups, word & MASK32) for word in (position, choice, int(purpose)))
    return (groups, *fixed)
