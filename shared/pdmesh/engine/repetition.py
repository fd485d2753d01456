"""Tells whether an output has begun to repeat itself, so that the scheduler can end it (finish reason "repetition").

Semantics are vLLM's: some pattern of `min_pattern_size` to `max_pattern_size` tokens stands at the output's end at least
`min_count` times in a row. The prompt does not count, and nothing is looked for before `min_tokens`. As
the largest size 0 is off, as the smallest it stands for 1; `sampling_limits` checks the ranges.
"""

import numpy as np
from numpy.typing import NDArray

from pdmesh.protocol.messages import RepetitionDetection


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
