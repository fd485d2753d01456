"""Repetition at an output's end, against a plain reading of what it means."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pdmesh.engine.repetition import ends_in_repetition
from pdmesh.protocol.messages import RepetitionDetection


def detection(high: int, low: int = 0, count: int = 2) -> RepetitionDetection:
    return RepetitionDetection(max_pattern_size=high, min_pattern_size=low, min_count=count)


def plain(tokens: list[int], rule: RepetitionDetection) -> bool:
    for size in range(max(rule.min_pattern_size, 1), rule.max_pattern_size + 1):
        pattern = tokens[-size:]
        if len(tokens) >= size * rule.min_count and tokens[-size * rule.min_count :] == pattern * rule.min_count:
            return True
    return False


@pytest.mark.parametrize(
    ("tokens", "rule", "expected"),
    [
        ([7, 7], detection(1), True),
        ([7, 8], detection(5), False),
        ([1, 2, 3, 2, 3], detection(2), True),
        ([1, 2, 3, 2, 3], detection(2, count=3), False),
        ([2, 3, 2, 3, 2, 3], detection(2, count=3), True),
        # A pattern of one token repeats inside, but patterns are at least two long here.
        ([1, 9, 9, 9], detection(4, low=2), False),
        ([9, 9, 9, 9], detection(4, low=2), True),
        # Repeated earlier, not at the end.
        ([2, 3, 2, 3, 4], detection(2), False),
        ([], detection(3), False),
        ([5], detection(3), False),
        ([5, 5, 5], detection(0), False),
        ([4, 5, 6, 4, 5, 6], detection(2), False),
        ([4, 5, 6, 4, 5, 6], detection(1000), True),
    ],
)
def test_known_cases(tokens: list[int], rule: RepetitionDetection, expected: bool) -> None:
    assert ends_in_repetition(np.array(tokens, dtype=np.uint32), rule) is expected


@settings(max_examples=400, deadline=None)
@given(st.lists(st.integers(0, 2), max_size=30), st.integers(0, 12), st.integers(0, 6), st.integers(2, 5))
def test_it_is_what_a_plain_search_finds(tokens: list[int], high: int, low: int, count: int) -> None:
    rule = detection(high, min(low, high), count)
    assert ends_in_repetition(np.array(tokens, dtype=np.int64), rule) == plain(tokens, rule)
