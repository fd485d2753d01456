"""Every row and every column of the fault matrix, in a few cells; `./dev faults` runs all of them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from faults.matrix import Cell, covering
from faults.stage import Stage
from faults.trial import RightTokens, check

pytestmark = [pytest.mark.mesh, pytest.mark.timeout(240)]


@pytest.mark.parametrize("cell", covering(), ids=lambda cell: cell.name)
def test_the_answer_is_right_or_a_named_error_and_nothing_is_held(
    cell: Cell, stage_for: Callable[[Cell], Stage], right_tokens: RightTokens, tmp_path: Path
) -> None:
    result = check(stage_for(cell), cell, right_tokens, tmp_path)
    assert result.passed, result
