"""Prompts over the fake backend's vocabulary."""

import random

from support.fake_backend import VOCAB_SIZE


def random_prompt(length: int) -> list[int]:
    """Return `length` ids, the same for every call, none of them EOS."""
    generator = random.Random(length)
    return [generator.randrange(2, VOCAB_SIZE) for _ in range(length)]
