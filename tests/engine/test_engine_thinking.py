"""The thinking budget as a state over tokens: when it forces, what, and that replaying rebuilds it."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pdmesh.engine.thinking import ThinkingState
from pdmesh.protocol.messages import ThinkingBudget

START, END = [1, 2], [3, 4]


def state(
    prompt: list[int], budget: int, output: list[int] | None = None, start: list[int] = START, end: list[int] = END
) -> ThinkingState:
    thinking = ThinkingBudget(budget=budget, start_token_ids=start, end_token_ids=end)
    return ThinkingState(thinking, np.array(prompt, dtype=np.uint32), np.array(output or [], dtype=np.uint32))


def generate(thinking: ThinkingState, wanted: list[int]) -> list[int]:
    """What comes out when the model wants these tokens, one by one."""
    out = []
    for token_id in wanted:
        out.append(token_id if thinking.forced is None else thinking.forced)
        thinking.observe(out[-1])
    return out


def test_a_section_of_the_output_ends_at_its_budget() -> None:
    assert generate(state([9], 3), [1, 2, 7, 7, 7, 7, 7, 7]) == [1, 2, 7, 7, 7, 3, 4, 7]


def test_a_section_that_ends_by_itself_is_left_alone() -> None:
    assert generate(state([9], 4), [1, 2, 7, 3, 4, 7, 7, 7, 7, 7]) == [1, 2, 7, 3, 4, 7, 7, 7, 7, 7]


def test_nothing_is_forced_outside_of_a_section() -> None:
    assert generate(state([9], 0), [7] * 5) == [7] * 5
    assert generate(state([9, 1, 2, 8, 3, 4, 8], 1), [7] * 5) == [7] * 5


def test_a_budget_of_zero_ends_a_section_at_once() -> None:
    assert generate(state([9], 0), [1, 2, 7, 7, 7]) == [1, 2, 3, 4, 7]
    assert generate(state([9, 1, 2], 0), [7, 7, 7]) == [3, 4, 7]


def test_tokens_of_a_section_that_the_prompt_opened_count() -> None:
    assert generate(state([9, 1, 2, 8, 8], 3), [7, 7, 7, 7]) == [7, 3, 4, 7]
    assert generate(state([9, 1, 2, 8, 8, 8, 8], 3), [7, 7, 7]) == [3, 4, 7]
    # The last start of the prompt counts.
    assert generate(state([1, 2, 8, 8, 1, 2, 8], 3), [7, 7, 7, 7, 7]) == [7, 7, 3, 4, 7]


def test_a_start_inside_an_open_section_is_nothing_new() -> None:
    assert generate(state([9], 4), [1, 2, 7, 1, 2, 7, 7, 7]) == [1, 2, 7, 1, 2, 7, 3, 4]


def test_a_later_section_has_a_fresh_budget() -> None:
    wanted = [1, 2, 7, 7, 7, 7, 8, 1, 2, 7, 7, 7, 7]
    assert generate(state([9], 2), wanted) == [1, 2, 7, 7, 3, 4, 8, 1, 2, 7, 7, 3, 4]
    assert generate(state([9], 2), [1, 2, 7, 3, 4, 1, 2, 7, 7, 7, 7]) == [1, 2, 7, 3, 3, 4, 2, 7, 7, 7, 7]


def test_an_end_that_had_begun_is_forced_as_a_whole() -> None:
    assert generate(state([9], 2), [1, 2, 7, 3, 7, 7, 7]) == [1, 2, 7, 3, 3, 4, 7]


def test_starts_and_ends_over_the_prompts_border_are_not_seen() -> None:
    assert generate(state([9, 1], 1), [2, 7, 7, 7]) == [2, 7, 7, 7]
    assert generate(state([1, 2, 3], 3), [4, 7, 7]) == [4, 7, 3]


def test_an_end_whose_tokens_are_alike() -> None:
    assert generate(state([9], 1, end=[3, 3]), [1, 2, 3, 7, 7, 7]) == [1, 2, 3, 3, 3, 7]
    assert generate(state([9], 3, end=[3, 3]), [1, 2, 3, 3, 7, 7]) == [1, 2, 3, 3, 7, 7]


@pytest.mark.parametrize("pair", [([], END), (START, [])])
def test_without_a_start_or_an_end_there_is_nothing_to_force(pair: tuple[list[int], list[int]]) -> None:
    assert generate(state([1, 2], 0, start=pair[0], end=pair[1]), [1, 2, 7, 7]) == [1, 2, 7, 7]


def test_tokens_that_were_not_forced_elsewhere_put_the_end_off() -> None:
    resumed = state([9], 1, output=[1, 2, 7, 7, 3, 7])
    assert generate(resumed, [7, 7, 7]) == [3, 4, 7]


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(1, 5), max_size=8), st.lists(st.integers(1, 5), max_size=25), st.integers(0, 5))
def test_replayed_at_any_place_it_goes_on_the_same(prompt: list[int], wanted: list[int], budget: int) -> None:
    whole = generate(state(prompt, budget), wanted)
    for cut in range(len(wanted)):
        resumed = state(prompt, budget, whole[:cut])
        assert generate(resumed, wanted[cut:]) == whole[cut:]
