"""The fault matrix as data: whole, and every part of it in the subset that each run of the tests tries."""

from __future__ import annotations

from faults import beside, report, results
from faults.columns import REACHING
from faults.injections import INJECTIONS, ON_PROCESS, QUALITIES
from faults.matrix import (
    COLUMNS,
    LEFT,
    RIGHT,
    ROWS,
    Answer,
    Connector,
    Fault,
    Policy,
    all_cells,
    covering,
    impossible,
    required,
)

NEVER = {Answer.WRONG, Answer.OTHER, Answer.LATE}


def test_every_cell_requires_something_and_no_cell_allows_wrong_tokens_or_silence() -> None:
    for cell in all_cells():
        assert required(cell), cell
        assert not required(cell) & NEVER, cell


def test_with_a_live_alternative_only_right_tokens_will_do() -> None:
    for cell in all_cells():
        if cell.policy is Policy.ALTERNATIVE:
            assert required(cell) == (LEFT if cell.row.fault is Fault.DISCONNECT else RIGHT), cell


def test_each_row_and_column_has_cells_and_the_missing_ones_say_why() -> None:
    cells = {(cell.row, cell.column) for cell in all_cells()}
    for row in ROWS:
        for column in COLUMNS:
            assert ((row, column) in cells) != bool(impossible(row, column)), (row, column)
        assert any(cell_row == row for cell_row, _ in cells)


def test_the_covering_cells_exist_and_have_all_rows_columns_policies_and_connectors() -> None:
    cells, chosen = set(all_cells()), covering()
    assert set(chosen) <= cells
    assert len(chosen) == len(set(chosen))
    assert {cell.row for cell in chosen} == set(ROWS)
    assert {cell.column for cell in chosen} == set(COLUMNS)
    assert {cell.policy for cell in chosen} == set(Policy)
    assert {cell.connector for cell in chosen} == set(Connector)


def test_each_fault_and_each_moment_can_be_brought_about() -> None:
    assert {*INJECTIONS, *ON_PROCESS, *QUALITIES} == set(Fault)
    assert set(REACHING) == set(COLUMNS)


def test_what_stands_beside_is_of_the_same_rows_and_columns() -> None:
    text = list(beside.lines())
    (header,) = [line for line in text if line.startswith("| | ")]
    columns = [each.strip() for each in header.strip("|").split("|")][1:]
    rows = [line.split("|")[1].strip() for line in text if line.startswith("| ") and line != header]
    assert columns == [column for column in COLUMNS if column in columns]
    # Our handoffs name the request they are for; vLLM's do not, so that is tried there besides.
    assert set(rows) - {row.name for row in ROWS} <= {"wrong request's KV"}
    assert len(rows) > 5


def test_the_page_is_what_the_last_run_makes_of_it() -> None:
    newest = results.newest()
    if newest is not None:
        assert report.PAGE.read_text(encoding="utf-8") == report.page(newest), "run: ./dev faults --report"
