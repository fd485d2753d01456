"""Tells whether an output has begun to repeat itself, so that the scheduler can end it (finish reason "repetition").

Semantics are vLLM's: some pattern of `min_pattern_size` to `max_pattern_size` tokens stands at the output's end at least
`min_count` times in a row. The prompt does not count, and nothing is looked for before `min_tokens`.
"""

import numpy as np
from numpy.typing import NDArray

from pdmesh.errors import InvalidRequest
from pdmesh.protocol.messages import RepetitionDetection

PARAM = "repetition_detection"


def check_repetition(detection: RepetitionDetection) -> None:
    """Raise InvalidRequest unless 0 ≤ min_pattern_size ≤ max_pattern_size, and min_count ≥ 2 where it is on at all.

    `max_pattern_size` 0 is off; `min_pattern_size` 0 stands for 1. A pattern longer than the output never repeats, so
    there is no upper bound to check.
    """
    low, high = detection.min_pattern_size, detection.max_pattern_size
    if high < 0:
        raise InvalidRequest(f"{PARAM}.max_pattern_size must be at least 0 (off), got {high}", param=PARAM)
    if not 0 <= low <= high:
        raise InvalidRequest(f"{PARAM}.min_pattern_size must be in 0…max_pattern_size={high}, got {low}", param=PARAM)
    if high > 0 and detection.min_count < 2:
        raise InvalidRequest(f"{PARAM}.min_count must be at least 2, got {detection.min_count}", param=PARAM)


def ends_in_repetition(tokens: NDArray[np.integer], detection: RepetitionDetection) -> bool:
    """Whether `tokens`, all of the output so far, end in `min_count` copies of one pattern.

    Looks at the last max_pattern_size * min_count tokens only. Each token costs a few vector operations over them, unless
    the end nearly repeats in many ways at once.
    """
    count, low = detection.min_count, max(detection.min_pattern_size, 1)
    high = min(detection.max_pattern_size, len(tokens) // count) if count >= 2 else 0
    if high < low:
        return False
    # A pattern of `size` can only repeat if the last token stands `size` places before the end too.
    before = tokens[len(tokens) - 1 - high : len(tokens) - low][::-1]
    sizes = np.flatnonzero(before == tokens[-1]) + low
    return any(_repeats(tokens, size, count) for size in sizes.tolist())


def _repeats(tokens: NDArray[np.integer], size: int, count: int) -> bool:
    tail = tokens[len(tokens) - size * count :]
    # The latest copy first: most candidates fail there.
    if size > 1 and not np.array_equal(tail[-size:], tail[-2 * size : -size]):
        return False
    return bool((tail[size:] == tail[:-size]).all())
