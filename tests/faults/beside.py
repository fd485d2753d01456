"""What stands beside the matrix on docs/faults.md: the same faults on vLLM, and the soak's counts; from benchmarks/results/."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from faults import results
from faults.matrix import COLUMNS

FOLDER = results.ROOT / "benchmarks" / "results"


def lines(folder: Path = FOLDER) -> Iterator[str]:
    """Sections of what has been run; nothing for what has not."""
    if (peer := _newest(folder, "faults-vllm")) is not None:
        yield from _peer(peer)
    if (soak := _newest(folder, "soak")) is not None:
        yield from _soak(soak)


def _newest(folder: Path, name: str) -> dict[str, Any] | None:
    found = sorted(folder.glob(f"*-{name}.json"))
    return json.loads(found[-1].read_text(encoding="utf-8")) if found else None


def _peer(run: dict[str, Any]) -> Iterator[str]:
    versions = ", ".join(f"{name} {version}" for name, version in run["versions"].items())
    found = {(each["row"], each["moment"]): each for each in run["outcomes"]}
    columns = [column for column in COLUMNS if any(moment == column for _, moment in found)]
    yield from ("", "## The same on vLLM", "")
    yield f"One prefill and one decode with NixlConnector behind vllm-router ({versions}), {run['date']}, as far as these"
    yield "faults reach them from outside; `kv_load_failure_policy` is its default, fail. In a cell: what the client got, the"
    yield "seconds until then, and those from then until no living engine held a block. By `benchmarks/faults_vllm.py`."
    yield from ("", "| | " + " | ".join(columns) + " |", "|---|" + "---|" * len(columns))
    for row in dict.fromkeys(each["row"] for each in run["outcomes"]):
        yield f"| {row} | " + " | ".join(_cell(found.get((row, column))) for column in columns) + " |"
    if later := [each for each in run["outcomes"] if each.get("at")]:
        times = sorted(each["at"] for each in later)
        yield from (
            "",
            f"Run in parts: {len(later)} of these cells later than the others, from {times[0]} to {times[-1]} UTC:",
        )
        yield f"{'; '.join(each['cell'] for each in later)}."
    if run["notes"]:
        yield from ("", *run["notes"])


def _cell(outcome: dict[str, Any] | None) -> str:
    if outcome is None:
        return ""
    held = "over 60" if outcome["held_s"] is None else f"{outcome['held_s']:.1f}"
    return f"{outcome['answer']} {outcome['took_s']:.1f} + {held} s"


def _soak(run: dict[str, Any]) -> Iterator[str]:
    counts = run["counts"]
    total, num_faults = sum(counts.values()), sum(run["faults"].values())
    failures = run["failures"]
    yield from ("", "## Soak", "")
    yield f"**{'FAILED' if failures else 'PASSED'}** by its own count, with {len(failures)} failures."
    yield f"{run['minutes']:g} minutes of load on 2 prefill, 2 decode, kvcache with Valkey and a proxy, {run['date']}, commit"
    yield f"`{run['commit']}`: {total} requests while {num_faults} faults happened, every answer compared with one engine's:"
    yield f"{', '.join(f'{count} {name}' for name, count in counts.items())}; {counts['right'] / max(1, total):.2%} right."
    yield "`lost`: the proxy was killed under them. By `./dev soak`; all counts are in benchmarks/results/."
    if failures:
        yield from ("", *(f"- {' '.join(each.split())[:300]}" for each in failures))
