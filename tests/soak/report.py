"""The soak's result: a JSON with all counts, and a short table of them."""

from __future__ import annotations

import json
import os
import platform
import statistics
import subprocess
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from soak.answers import Verdict
from soak.faults import Faults
from soak.load import Load
from soak.schedule import WAYS
from soak.watch import Watch, summary

RIGHT_SHARE = 0.99
USES_EVERY_WAY_MINUTES = 15.0
"""A run of that length must have moved KV by each way."""
BAD = (Verdict.WRONG, Verdict.TRUNCATED, Verdict.HUNG)


@dataclass(kw_only=True)
class Report:
    """What one run found."""

    seed: int
    minutes: float
    counts: dict[str, int]
    faults: dict[str, int]
    problems: list[str]
    facts: dict[str, Any]
    answers_not_right: list[dict[str, Any]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    """What a reader must know of this run."""
    date: str = field(default_factory=lambda: datetime.now(UTC).strftime("%Y-%m-%d"))
    commit: str = field(default_factory=lambda: _commit())
    machine: str = field(default_factory=lambda: _machine())

    @property
    def num_requests(self) -> int:
        return sum(self.counts.values())

    @property
    def right_share(self) -> float:
        return self.counts[Verdict.RIGHT] / max(1, self.num_requests)

    def failures(self, at_least: int) -> list[str]:
        """Everything that this run should not have shown."""
        found = [f"{self.counts[verdict]} answers {verdict}" for verdict in BAD if self.counts[verdict]]
        if self.right_share < RIGHT_SHARE:
            found.append(f"{self.right_share:.2%} right, less than {RIGHT_SHARE:.0%}")
        if self.num_requests < at_least:
            found.append(f"{self.num_requests} requests, fewer than {at_least}")
        return found + self.problems

    def write(self, path: Path, at_least: int) -> str:
        """Write `path` (JSON) and the table beside it; return the table."""
        path.parent.mkdir(parents=True, exist_ok=True)
        failures = self.failures(at_least)
        result = asdict(self) | {"verdict": verdict(failures), "failures": failures}
        path.write_text(json.dumps(result, indent=1, ensure_ascii=False) + "\n")
        table = self.table(failures)
        path.with_suffix(".md").write_text(table)
        return table

    def table(self, failures: list[str]) -> str:
        """Markdown."""
        counted = ", ".join(f"{self.counts[each]} {each}" for each in Verdict)
        rows = [
            *((f"answers {verdict}", self.counts[verdict]) for verdict in Verdict),
            ("share right", f"{self.right_share:.3%}"),
            *self.facts.items(),
        ]
        return "\n".join(
            [
                f"# Soak of {self.minutes:g} minutes, {self.date}: {verdict(failures)}",
                "",
                f"{verdict(failures)}: {self.num_requests} answers, {counted}; {len(failures)} failures.",
                "",
                "2 prefill, 2 decode, kvcache with Valkey and a proxy, with a tiny float32 model; every answer is compared with",
                f"one engine's alone. Commit {self.commit}, seed {self.seed}, {self.machine}.",
                "Again: `./dev soak`. Beside this: the JSON with every answer that was not right.",
                "",
                *_table("what", "count", rows),
                "",
                *_table("fault", "times", sorted(self.faults.items())),
                "",
                *(
                    ["Failures:", "", *(f"- {line.splitlines()[0]}" for line in failures)]
                    if failures
                    else ["No failures."]
                ),
                *(["", *self.notes] if self.notes else []),
                "",
            ]
        )


def verdict(failures: list[str]) -> str:
    """What the run itself says of itself; nobody edits that afterwards."""
    return "FAILED" if failures else "PASSED"


def make_report(
    load: Load, faults: Faults, watch: Watch, *, seed: int, minutes: float, facts: dict[str, Any]
) -> Report:
    """Gather what the parts have seen."""
    latencies = sorted(load.latencies_s)
    cuts = statistics.quantiles(latencies, n=100) if len(latencies) > 1 else [0.0] * 99
    return Report(
        seed=seed,
        minutes=minutes,
        counts={str(verdict): load.counts[verdict] for verdict in Verdict},
        faults=dict(faults.done),
        problems=[
            *watch.problems,
            *_unused(load, minutes),
            *(f"bad request {what}: {count}" for what, count in load.bad_requests.items() if what not in HARMLESS),
        ],
        facts={
            "clients that left": load.num_disconnects,
            "bad requests refused": load.bad_requests["refused"],
            "requests served by prefill and decode": load.reasons["disaggregated"],
            "served otherwise": _listed(load.reasons, leave_out="disaggregated"),
            "KV of right answers came from": _listed(load.kv_sources),
            "legs that failed and went on elsewhere, fallbacks": _listed(load.fallbacks),
            "latency p50, p99, longest, s": f"{cuts[49]:.2f}, {cuts[98]:.2f}, {latencies[-1] if latencies else 0:.2f}",
            "longest until nothing was held, s": round(watch.slowest_s, 1),
            **facts,
            "private memory in quiet windows, MiB": summary(watch),
        },
        answers_not_right=[asdict(seen) for seen in load.seen],
    )


def _unused(load: Load, minutes: float) -> list[str]:
    """Ways of KV that a long run should have gone and has not."""
    missing = [way for way in WAYS if not any(name.startswith(way) for name in load.kv_sources)]
    return [f"no KV came by {way}" for way in missing] if minutes >= USES_EVERY_WAY_MINUTES else []


HARMLESS = ("refused", "lost with the proxy")


def _listed(counts: dict[str, int], leave_out: str = "") -> str:
    return ", ".join(f"{name or 'none'} {count}" for name, count in sorted(counts.items()) if name != leave_out)


def _table(first: str, second: str, rows: Iterable[tuple[str, Any]]) -> list[str]:
    flat = [(name, value) for name, value in rows if not isinstance(value, dict)]
    return [f"| {first} | {second} |", "|---|---|", *(f"| {name} | {value} |" for name, value in flat)]


def _commit() -> str:
    told = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=Path(__file__).parent, capture_output=True, text=True, check=False
    )
    return told.stdout.strip() or "unknown"


def _machine() -> str:
    return f"{os.cpu_count()} cores, Linux {platform.release()}, Python {platform.python_version()}"
