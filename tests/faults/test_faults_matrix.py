"""All cells of the fault matrix. `./dev faults` runs this file, keeps what came of each cell, and goes on where it stopped."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from faults.matrix import Cell, all_cells
from faults.results import Results, current_commit, todays
from faults.stage import Stage
from faults.trial import RightTokens, check

KEEP_VARIABLE = "PDMESH_TEST_FAULTS"
"""Set: results are kept, and what has passed is not run again."""

pytestmark = [pytest.mark.mesh, pytest.mark.full, pytest.mark.timeout(300)]


@pytest.fixture(scope="session")
def results() -> Results | None:
    return Results(todays(), current_commit()) if os.environ.get(KEEP_VARIABLE) else None


@pytest.mark.parametrize(
    "cell",
    [
        # One process for each kind of mesh: it stands for many cells.
        pytest.param(cell, id=cell.name, marks=pytest.mark.xdist_group(cell.kind))
        for cell in all_cells()
    ],
)
def test_the_answer_is_right_or_a_named_error_and_nothing_is_held(
    cell: Cell,
    stage_for: Callable[[Cell], Stage],
    right_tokens: RightTokens,
    results: Results | None,
    tmp_path: Path,
) -> None:
    if results is not None and results.has(cell):
        pytest.skip("has passed at this commit")
    result = check(stage_for(cell), cell, right_tokens, tmp_path)
    if results is not None:
        results.add(result)
    assert result.passed, result
