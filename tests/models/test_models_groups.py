"""How layers are parted into KV groups, and what a block of each holds."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdmesh.models.group_plan import MAX_GROUPS, LayerGroup, plan_groups


def every(pattern: int, num_layers: int, window: int = 512) -> list[int | None]:
    """Windows of a model in which each `pattern`-th layer sees all."""
    return [None if (layer + 1) % pattern == 0 else window for layer in range(num_layers)]


def sizes(windows: list[int | None]) -> list[tuple[int | None, int]]:
    return [(group.window, len(group.layers)) for group in plan_groups(windows)]


@pytest.mark.parametrize("window", [None, 4096])
def test_layers_that_are_all_alike_are_one_group(window: int | None) -> None:
    assert plan_groups([window] * 32) == [LayerGroup(window, tuple(range(32)))]


def test_gemma_3_of_26_layers_is_one_full_and_six_sliding_groups() -> None:
    groups = plan_groups(every(6, 26))
    assert groups[0] == LayerGroup(None, (5, 11, 17, 23))
    assert groups[1] == LayerGroup(512, (0, 1, 2, 3))
    assert groups[2] == LayerGroup(512, (4, 6, 7, 8))
    assert [len(group.layers) for group in groups] == [4, 4, 4, 4, 4, 4, 2]


@pytest.mark.parametrize(
    ("windows", "expected"),
    [
        (every(6, 34), [(None, 5)] + [(512, 5)] * 5 + [(512, 4)]),
        (every(6, 62), [(None, 10)] + [(512, 10)] * 5 + [(512, 2)]),
        (every(2, 26), [(None, 13), (512, 13)]),
        # The rarest kind's 12 would pad a third; 13 pads one place of 26.
        (every(2, 25), [(None, 12), (512, 13)]),
        # One of its kind would make 32 groups; 4 pads three places of 36.
        (every(32, 32), [(None, 1)] + [(512, 4)] * 7 + [(512, 3)]),
        ([None, 100, 100, 200, 200, 200], [(None, 1), (200, 1), (200, 1), (200, 1), (100, 1), (100, 1)]),
        ([64], [(64, 1)]),
    ],
    ids=["34 layers", "62 layers", "halves", "nearly halves", "one of 32", "three kinds", "one layer"],
)
def test_sizes(windows: list[int | None], expected: list[tuple[int | None, int]]) -> None:
    assert sizes(windows) == expected


def test_more_kinds_than_groups_should_be_have_one_group_each() -> None:
    assert len(plan_groups(list(range(1, MAX_GROUPS + 5)))) == MAX_GROUPS + 4


@given(st.lists(st.sampled_from([None, 8, 64]), min_size=1, max_size=80))
def test_every_layer_is_in_one_group_of_its_rule(windows: list[int | None]) -> None:
    groups = plan_groups(windows)
    assert sorted(layer for group in groups for layer in group.layers) == list(range(len(windows)))
    assert all(windows[layer] == group.window for group in groups for layer in group.layers)
    assert all(list(group.layers) == sorted(group.layers) for group in groups)
    assert len(groups) <= MAX_GROUPS
    size = max(len(group.layers) for group in groups)
    assert len(windows) / (size * len(groups)) > 0.5
