"""`./dev soak`: a mesh under load for half an hour while its parts are killed, frozen and restarted; every answer is checked.

Exit code 0: no answer was wrong, cut short or late beyond its deadline, at least 99 % were right, and nothing was left behind.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
from datetime import UTC, datetime
from pathlib import Path

from soak.run import Settings, run

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"
REQUESTS_PER_MINUTE = 167
"""5,000 in half an hour."""


def main() -> int:
    parser = argparse.ArgumentParser(prog="./dev soak", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--minutes", type=float, default=30.0, help="default: 30")
    parser.add_argument("--seed", type=int, default=1, help="of the requests and of the faults; default: 1")
    parser.add_argument("--rate", type=float, default=10.0, help="requests per second beside the bursts; default: 10")
    parser.add_argument(
        "--every", type=float, default=30.0, help="seconds from one engine fault to the next; default: 30"
    )
    parser.add_argument("--output", type=Path, help="JSON to write, a table beside it; default: in benchmarks/results/")
    parser.add_argument(
        "--folder", type=Path, help="logs of the services; default: a temporary folder, gone after success"
    )
    options = parser.parse_args()
    if min(options.minutes, options.rate, options.every) <= 0:
        parser.error("--minutes, --rate and --every must be above 0")
    output = options.output or RESULTS / f"{datetime.now(UTC):%Y-%m-%d}-soak.json"
    settings = Settings(minutes=options.minutes, seed=options.seed, rate=options.rate, every_s=options.every)
    folder = options.folder or Path(tempfile.mkdtemp(prefix="pdmesh-soak-"))
    folder.mkdir(parents=True, exist_ok=True)
    report = run(settings, folder, log=_say)
    at_least = int(options.minutes * REQUESTS_PER_MINUTE)
    _say(report.write(output, at_least))
    if failures := report.failures(at_least):
        _say("\n".join([*failures, f"services' logs: {folder}"]))
        return 1
    if options.folder is None:
        shutil.rmtree(folder)
    return 0


def _say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
