"""Results of cells, one JSON object a line, so that a run that was stopped goes on where it was."""

from __future__ import annotations

import json
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from faults.matrix import Cell
from faults.trial import Result

ROOT = Path(__file__).resolve().parents[2]
FOLDER = Path(__file__).resolve().parent / "results"
# What a result is about: a change elsewhere leaves it true.
TESTED = ("shared", "services", "kernels")


class Results:
    """The file of one day's run. Several processes may append to it; what is there of the same commit is done."""

    def __init__(self, path: Path, commit: str) -> None:
        self._path = path
        self._commit = commit
        self._done = {line["cell"] for line in read(path) if line["commit"] == commit and line["passed"]}

    def has(self, cell: Cell) -> bool:
        """Whether the cell has passed at this commit."""
        return cell.name in self._done

    def add(self, result: Result) -> None:
        line = {"commit": self._commit, "at": datetime.now(UTC).isoformat(timespec="seconds")} | result.as_json()
        self._path.parent.mkdir(parents=True, exist_ok=True)
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")


def read(path: Path) -> list[dict[str, Any]]:
    """All lines of a file, oldest first; none when there is no file."""
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line]


def newest() -> Path | None:
    """The file of the last day on which the matrix was run."""
    return max(FOLDER.glob("*.jsonl"), default=None)


def todays() -> Path:
    return FOLDER / f"{datetime.now(UTC):%Y-%m-%d}.jsonl"


def current_commit() -> str:
    """The commit of what is tested, marked when something of it was changed since."""
    commit = _git("rev-parse", "--short=12", "HEAD") or "unknown"
    return f"{commit}+changes" if _git("status", "--porcelain", "--", *TESTED) else commit


def _git(*arguments: str) -> str:
    try:
        done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=False)
    except OSError:
        return ""
    return done.stdout.strip()


if __name__ == "__main__" and "--forget" in sys.argv:
    todays().unlink(missing_ok=True)
