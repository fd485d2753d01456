"""What `cpu.py` found, as JSON with every round and as a table in Markdown."""

import datetime
import json
import os
import platform
import statistics
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from cpu_rows import HEADINGS, START_RATIO, START_TITLE, Cell, Row


@dataclass(kw_only=True)
class Sample:
    """One round: the numbers of `Round.summary`, and what else could have disturbed it."""

    numbers: dict[str, float]
    errors: list[str]
    load_average: float
    """Of the machine when the round began; over the number of cores, others were at work too."""


@dataclass(kw_only=True)
class RowResult:
    """All rounds of a row; the peer's are missing where it was not there."""

    row: Row
    ours: list[Sample] = field(default_factory=list)
    peer: list[Sample] = field(default_factory=list)


@dataclass(kw_only=True)
class CellResult:
    """All rounds of one cell of the growth table, by side."""

    cell: Cell
    samples: dict[str, list[Sample]]


@dataclass(kw_only=True)
class Report:
    """One run of the benchmark."""

    commands: dict[str, list[str]] = field(default_factory=dict)
    rows: list[RowResult] = field(default_factory=list)
    growth: list[CellResult] = field(default_factory=list)
    starts_s: dict[str, list[float]] = field(default_factory=dict)
    """Start to first answer of each side, in the start row's runs only."""
    first_starts_s: dict[str, float] = field(default_factory=dict)
    """The same the first time in this run, with whatever caches were there."""
    left_out: list[str] = field(default_factory=list)
    """Why a row or its peer was not measured."""

    def errors(self) -> list[str]:
        """Of all rounds."""
        of_rows = [sample for result in self.rows for sample in (*result.ours, *result.peer)]
        of_cells = [sample for result in self.growth for samples in result.samples.values() for sample in samples]
        return [error for sample in (*of_rows, *of_cells) for error in sample.errors]

    def write(self, folder: Path) -> Path:
        """Write both files, named after the day; the path of the table is returned."""
        stem = folder / f"{datetime.date.today().isoformat()}-cpu"
        facts = {"machine": machine(), "num_errors": len(self.errors())} | asdict(self)
        stem.with_suffix(".json").write_text(json.dumps(facts, indent=1, ensure_ascii=False) + "\n")
        table = stem.with_suffix(".md")
        table.write_text(self.markdown())
        return table

    def markdown(self) -> str:
        """The tables, losses included, and the commands behind them."""
        facts = machine()
        parts = [
            f"# CPU benchmark, {datetime.date.today().isoformat()}",
            f"{facts['cpu']}, {facts['cores']} cores, {facts['memory_gib']} GiB. Medians over rounds that alternate between the "
            "two servers; in brackets the least and the greatest round.",
        ]
        if self.rows or self.starts_s:
            parts.append(
                "\n".join([*_table_head(), *(line for row in self.rows for line in _row_lines(row)), *self._start()])
            )
        if self.growth:
            parts.append("## How the cost grows\n\nMedian gap between tokens in ms, then TTFT p50 in ms.")
            parts.append("\n".join(_growth_lines(self.growth)))
        if self.left_out:
            parts.append("\n".join(["Left out:", "", *(f"- {line}" for line in self.left_out)]))
        if errors := self.errors():
            parts.append(f"**{len(errors)} requests failed**; the first: {errors[0]}")
        commands = [f"# {name}\n{line}" for name, lines in self.commands.items() for line in lines]
        parts.append("\n".join(["## Commands", "", "```", *commands, "```"]))
        return "\n\n".join(parts) + "\n"

    def _start(self) -> list[str]:
        if not self.starts_s:
            return []
        ours, peer = self.starts_s.get("serve", []), self.starts_s.get("vllm", [])
        ratio = _ratio(ours, peer)
        return [
            _line(
                [
                    START_TITLE,
                    "seconds",
                    _spread(ours, 2),
                    f"vllm {_spread(peer, 1)}",
                    f"{ratio:.3f} ×" if ratio is not None else "-",
                    f"≤ {START_RATIO} ×",
                    _verdict(ratio is not None and ratio <= START_RATIO, ratio is not None),
                ]
            )
        ]


def machine() -> dict[str, Any]:
    """What the numbers were measured on."""
    info = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""
    names = [line.partition(":")[2].strip() for line in info.splitlines() if line.startswith("model name")]
    flags = next((line.split() for line in info.splitlines() if line.startswith("flags")), [])
    pages, page_bytes = os.sysconf("SC_PHYS_PAGES"), os.sysconf("SC_PAGE_SIZE")
    return {
        "cpu": names[0] if names else platform.processor() or platform.machine(),
        "cores": os.cpu_count(),
        "memory_gib": round(pages * page_bytes / 2**30),
        "isa": [flag for flag in flags if flag.startswith(("avx", "amx"))],
        "python": platform.python_version(),
    }


def _table_head() -> list[str]:
    heads = ["load", "number", "ours", "peer", "ours / peer", "goal", ""]
    return [_line(heads), _line(["---"] * len(heads))]


def _row_lines(result: RowResult) -> list[str]:
    lines = []
    for goal in result.row.goals:
        ours, peer = _values(result.ours, goal.key), _values(result.peer, goal.key)
        ratio = _ratio(ours, peer)
        lines.append(
            _line(
                [
                    result.row.title,
                    HEADINGS[goal.key],
                    f"{result.row.ours} {_spread(ours, 1)}",
                    f"{result.row.peer} {_spread(peer, 1)}",
                    f"{ratio:.2f} ×" if ratio is not None else "-",
                    str(goal),
                    _verdict(ratio is not None and goal.is_met(ratio), ratio is not None),
                ]
            )
        )
    return lines


def _growth_lines(results: list[CellResult]) -> list[str]:
    sides = sorted({side for result in results for side in result.samples})
    lines = [_line(["context", "streams", *sides]), _line(["---"] * (2 + len(sides)))]
    for result in results:
        cells = [
            f"{_middle(_values(samples, 'itl_p50_ms'))} / {_middle(_values(samples, 'ttft_p50_ms'))}"
            for samples in (result.samples.get(side, []) for side in sides)
        ]
        lines.append(_line([str(result.cell.context), str(result.cell.batch), *cells]))
    return lines


def _values(samples: list[Sample], key: str) -> list[float]:
    return [sample.numbers[key] for sample in samples if key in sample.numbers]


def _ratio(ours: list[float], peer: list[float]) -> float | None:
    return statistics.median(ours) / statistics.median(peer) if ours and peer and statistics.median(peer) else None


def _middle(values: list[float]) -> str:
    return f"{statistics.median(values):.1f}" if values else "-"


def _spread(values: list[float], digits: int) -> str:
    if not values:
        return "-"
    return f"**{statistics.median(values):.{digits}f}** ({min(values):.{digits}f}-{max(values):.{digits}f})"


def _verdict(is_met: bool, is_measured: bool) -> str:
    return ("met" if is_met else "**missed**") if is_measured else "not measured"


def _line(cells: list[str]) -> str:
    return f"| {' | '.join(cells)} |"
