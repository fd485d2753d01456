"""The rules of groups: what a window still needs, the most blocks at once, and where a cached prefix may end."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pdmesh.engine.kv_groups import KVGroup


def test_a_window_needs_the_blocks_of_the_tokens_it_sees() -> None:
    group = KVGroup(4, "sliding", 6)
    # The query at 9 sees 4 to 9.
    assert [group.first_needed(position) for position in (0, 5, 8, 9, 12, 13)] == [0, 0, 0, 1, 1, 2]
    assert KVGroup(4).first_needed(1000) == 0


@settings(max_examples=300, deadline=None)
@given(st.integers(1, 8), st.integers(1, 20), st.integers(1, 12), st.integers(0, 10**6))
def test_no_sequence_holds_more_blocks_than_the_bound(block_size: int, window: int, max_chunk: int, seed: int) -> None:
    """With steps planned ahead: a chunk has its blocks before the chunk before it is known to have ended."""
    group, rng = KVGroup(block_size, "sliding", window), random.Random(seed)
    num_tokens = rng.randint(1, 80)
    computed = planned = dropped = registered = most = 0
    chunks: list[int] = []
    while computed < num_tokens:
        if planned < num_tokens and len(chunks) < 2:
            chunks.append(min(rng.randint(1, max_chunk), num_tokens - planned))
            planned += chunks[-1]
            most = max(most, -(-planned // block_size) - dropped)
        else:
            computed += chunks.pop(0)
            if computed // block_size > registered:
                registered = computed // block_size
                dropped = group.first_needed(computed)
    assert most <= group.max_blocks(num_tokens, max_chunk)


@settings(max_examples=300, deadline=None)
@given(st.lists(st.booleans(), max_size=12), st.integers(1, 5), st.integers(0, 14))
def test_the_longest_hit_is_the_longest(cached: list[bool], block_size: int, window: int) -> None:
    group = KVGroup(block_size, "sliding" if window else "full", window)
    fitting = [
        end
        for end in range(len(cached) + 1)
        if all(cached[place] for place in range(group.first_needed(end * block_size), end))
    ]
    assert group.longest_hit(lambda place: cached[place], len(cached)) == max(fitting)


@pytest.mark.parametrize("window", [0, 6])
def test_a_short_sequence_needs_no_more_than_all_of_it(window: int) -> None:
    group = KVGroup(4, "sliding" if window else "full", window)
    assert group.max_blocks(5, 100) == 2
