"""A minute of `./dev soak`: faults come closer together, all else is as in the half hour."""

from __future__ import annotations

from pathlib import Path

import pytest

from soak.run import Settings, run

pytestmark = [pytest.mark.mesh, pytest.mark.timeout(400)]


def test_a_minute_of_faults_gives_right_answers_or_errors_and_leaves_nothing(
    tmp_path: Path,
) -> None:
    said: list[str] = []
    settings = Settings(minutes=1.0, seed=3, rate=8.0, every_s=12.0, num_shapes=120, num_windows=2)
    report = run(settings, tmp_path, log=said.append)
    # The share of right answers is the half hour's to show: here one fault is a tenth of all.
    failures = [line for line in report.failures(at_least=100) if "less than" not in line]
    assert not failures, "\n".join([*failures, *said])
    assert sum(report.faults.values()) - report.faults.get("left out", 0) >= 10, report.faults
