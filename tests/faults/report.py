"""Writes docs/faults.md from the last day's results: `python -m faults.report` with tests/ on the path; ./dev faults calls it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from faults import beside, results
from faults.matrix import COLUMNS, ROWS, Answer, Cell, Column, Policy, Row, all_cells, connectors, impossible, required

PAGE = results.ROOT / "docs" / "faults.md"
TITLES = {
    Policy.ALTERNATIVE: (
        "With a live alternative",
        "Two of each service that a request needs, `--kv-load-failure-policy recompute`. Required everywhere: the right tokens.",
    ),
    Policy.ALONE: (
        "Without one",
        "One of each, `--kv-load-failure-policy fail`, `--max-retries 0`. Required: the right tokens, or the error that the "
        "second line of a cell names.",
    ),
}
INTRODUCTION = """# What a fault comes to

Written by `./dev faults` from its results; do not edit. Rows are what is done to the mesh, columns the moment of the request at
which it is done. The meshes are real services with a tiny random model in float32, real NIXL, real Valkey; prompts have 600
tokens (ten chunks, 19 blocks), answers 12, greedy or seeded. What each cell must come to stands in
[tests/faults/matrix.py](../tests/faults/matrix.py) and was there before the cell was run.

In a cell: what the client got, the seconds from its request to the answer's end (the fault's own time included), and the seconds
from then until no node held a block, an offer or a lookup any more; where a cell is run over several connectors, the slowest of
each. `right`: every token is the single engine's. `503`: PeerUnavailable or Draining. `502`: TransferFailed. `connection ended`:
without the stream's end mark. `left`: the client went away. Before each of the last four there was no token, or only right ones.
`clock skew 60 s`: the request's decode and proxy have a monotonic clock, and one since boot, a minute ahead; decode's wall clock
is a minute ahead and the proxy's a minute behind. `restart`: SIGTERM, and the new one as soon as the old has ended.

SIGSTOP is of a whole service for 5 s, less than the proxy's `--heartbeat-timeout-s` (6). Where only an engine's core stands
still, its server goes on answering the proxy, and its requests are held for `--core-timeout-s` (20) before they go on
elsewhere: [set it](tuning.md#the-table) to a few times the longest step.
"""


def page(path: Path) -> str:
    """The whole page."""
    latest = _latest(path)
    return "\n".join(_lines(path, latest)) + "\n"


def _latest(path: Path) -> dict[str, dict[str, Any]]:
    """The last result of each cell, with how many before it did not pass."""
    latest: dict[str, dict[str, Any]] = {}
    for line in results.read(path):
        before = latest.get(line["cell"])
        failed = before["failed"] + (not before["passed"]) if before else 0
        latest[line["cell"]] = line | {"failed": failed}
    return latest


def _lines(path: Path, latest: dict[str, dict[str, Any]]) -> Iterator[str]:
    cells = all_cells()
    run = [latest[cell.name] for cell in cells if cell.name in latest]
    passed = sum(each["passed"] for each in run)
    commits = Counter(each["commit"] for each in run).most_common()
    yield INTRODUCTION
    yield f"Run on {path.stem}: {passed} of {len(cells)} cells passed, {len(run) - passed} failed,"
    yield f"{len(cells) - len(run)} were not run."
    yield f"Their commits: {', '.join(f'`{commit}` ({count})' for commit, count in commits)}; a cell's own is in the"
    yield "[results](../tests/faults/results). `+changes`: with what was uncommitted there at that moment."
    for policy, (title, text) in TITLES.items():
        yield from ("", f"## {title}", "", text, "")
        yield "| | " + " | ".join(COLUMNS) + " |"
        yield "|---|" + "---|" * len(COLUMNS)
        for row in ROWS:
            yield f"| {row.name} | " + " | ".join(_cell(row, column, policy, latest) for column in COLUMNS) + " |"
    yield from _reasons()
    yield from _failures([latest[cell.name] for cell in cells if cell.name in latest])
    yield from beside.lines()


def _cell(row: Row, column: Column, policy: Policy, latest: dict[str, dict[str, Any]]) -> str:
    if impossible(row, column):
        return "–"
    cells = [Cell(row, column, policy, connector) for connector in connectors(row, column)]
    found = [latest[cell.name] for cell in cells if cell.name in latest]
    if not found:
        return "not run"
    answers = list(dict.fromkeys(each["answer"] or _without_answer(each) for each in found))
    text = f"{', '.join(answers)} {max(each['answer_s'] for each in found):.1f} + {max(each['held_s'] for each in found):.1f} s"
    if not all(each["passed"] for each in found):
        text = f"**failed** ({text})"
    if len(found) < len(cells):
        text += f"; {len(cells) - len(found)} of {len(cells)} connectors not run"
    others = sorted(required(cells[0]) - {Answer.RIGHT, Answer.LEFT})
    return text + (f"<br>may be {', '.join(others)}" if others else "")


def _without_answer(result: dict[str, Any]) -> str:
    return "no answer" if result.get("reached") else "not reached"


def _reasons() -> Iterator[str]:
    yield from ("", "## Cells that do not exist", "")
    reasons: dict[tuple[str, str], list[str]] = {}
    for row in ROWS:
        for column in COLUMNS:
            if reason := impossible(row, column):
                reasons.setdefault((row.name, reason), []).append(column)
    for (name, reason), columns in reasons.items():
        yield f"- {name}: {'; '.join(columns)}: {reason}."


def _failures(run: list[dict[str, Any]]) -> Iterator[str]:
    failures = [each for each in run if not each["passed"]]
    again = [each for each in run if each["passed"] and each["failed"]]
    missed = [each for each in run if each.get("tries")]
    if failures:
        yield from ("", "## Failed", "")
        yield from (f"- {each['cell']}: {_one_line(each['fault'])}" for each in failures)
    if again:
        yield from ("", "## Passed only when tried again", "")
        yield from (f"- {each['cell']}: {each['failed']} earlier tries of that day did not" for each in again)
    if missed:
        yield from ("", "## Reached only when tried again", "")
        yield from (f"- {each['cell']}: {_one_line('; '.join(each['tries']))}" for each in missed)


def _one_line(text: str) -> str:
    return " ".join(text.split())[:300]


if __name__ == "__main__":
    if (found := results.newest()) is not None:
        PAGE.write_text(page(found), encoding="utf-8")
