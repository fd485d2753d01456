"""The definition of a block's sum, in numpy: what is used, too, where the CPU library is not to be had.

A block is a sequence of rows of sixteen 32-bit words, the last one filled up with zeros. For each of the sixteen columns there
are two sums in 64 bits: of the words, and of the words times the number of rows from theirs to the end. So a change of one
word, and a change of any two, always shows in them (as in Fletcher's sums, but without a modulus that two changes could
meet); these and the length are then mixed into 64 bits, where two different blocks agree by chance once in 2**64. It is no
defence against somebody who looks for such blocks.
"""

import time

import numpy as np
from numpy.typing import NDArray

Blocks = NDArray[np.uint8]
Ids = NDArray[np.int64]
Sums = NDArray[np.uint64]
Count = NDArray[np.int32]
"""One number."""

NUM_COLUMNS = 16
ROW_BYTES = 4 * NUM_COLUMNS
FACTOR = 0x9E3779B97F4A7C15
MASK = (1 << 64) - 1
POLL_S = 0.0002


def sum_blocks(blocks_NB: Blocks, ids: Ids) -> Sums:
    """Return the sums of the blocks `ids` (uint64, one each)."""
    return np.array([_sum(blocks_NB[block_id]) for block_id in ids], dtype=np.uint64)


def copy_blocks(target_NB: Blocks, target_ids: Ids, source_NB: Blocks, source_ids: Ids) -> Sums:
    """Copy blocks `source_ids` of one array to `target_ids` of another; return their sums."""
    target_NB[target_ids] = source_NB[source_ids]
    return sum_blocks(target_NB, target_ids)


def sum_arrivals(blocks_NB: Blocks, ids: Ids, arrived: Count, num_done: int, sums: Sums, patience_s: float) -> int:
    """Sum blocks `ids` from the one numbered `num_done` on as far as they have arrived; return how many are summed then.

    `arrived` may grow meanwhile; less than 0 says that it is over. Waits for at most `patience_s` for the next.
    """
    end_s = time.monotonic() + patience_s
    while num_done < len(ids):
        num = min(int(arrived[0]), len(ids))
        if num > num_done:
            sums[num_done:num] = sum_blocks(blocks_NB, ids[num_done:num])
            num_done, end_s = num, time.monotonic() + patience_s
        elif num < num_done or time.monotonic() >= end_s:
            break
        else:
            time.sleep(POLL_S)
    return num_done


def _sum(block: Blocks) -> int:
    rows = -(-len(block) // ROW_BYTES)
    padded = block if rows * ROW_BYTES == len(block) else np.concatenate([block, _zeros(rows * ROW_BYTES - len(block))])
    words = padded.view("<u4").reshape(rows, NUM_COLUMNS).astype(np.uint64)
    weights = np.arange(rows, 0, -1, dtype=np.uint64)
    total = len(block) * FACTOR & MASK
    for part in (words.sum(axis=0), weights @ words):
        for column in part.tolist():
            total = (total ^ column) * FACTOR & MASK
            total ^= total >> 32
    return total


def _zeros(num: int) -> Blocks:
    return np.zeros(num, dtype=np.uint8)
