"""One run of the soak: answers first, then load and faults side by side, quiet windows in between, and the verdict."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from soak.answers import Verdict
from soak.faults import Faults
from soak.fleet import Fleet
from soak.load import HANG_S, Load
from soak.report import Report, make_report
from soak.schedule import plan
from soak.shapes import draw_shapes, with_answers
from soak.watch import Watch
from support.tiny_models import make_tiny

NUM_SHAPES = 300
NUM_WINDOWS = 10
"""Times that the load pauses to see that nothing is held, the last one at the end."""
TICK_S = 0.05
SAY_S = 60.0


@dataclass(frozen=True, kw_only=True)
class Settings:
    minutes: float
    seed: int
    rate: float
    """Requests per second."""
    every_s: float
    """From one engine fault to the next."""
    num_shapes: int = NUM_SHAPES
    num_windows: int = NUM_WINDOWS


def run(settings: Settings, folder: Path, *, log: Callable[[str], None]) -> Report:
    """Run to the end whatever is found; services are down when it returns."""
    began_s = time.monotonic()

    def say(line: str) -> None:
        log(f"{time.monotonic() - began_s:7.1f} s  {line}")

    model = str(make_tiny("llama", folder / "model"))
    shapes = with_answers(model, draw_shapes(settings.seed, settings.num_shapes), settings.seed)
    say(f"one engine has answered {len(shapes)} requests")
    fleet = Fleet(folder, model, seed=settings.seed)
    fleet.log = say
    try:
        fleet.start()
        began_s = time.monotonic()
        load = Load(
            fleet.url, shapes, seed=settings.seed, rate=settings.rate, proxy_killed_since=fleet.proxy_killed_since
        )
        faults = Faults(
            fleet, load, plan(settings.seed, settings.minutes * 60, settings.every_s), seed=settings.seed, log=say
        )
        watch = Watch(fleet)
        _soak(settings, fleet, load, faults, watch, say)
        facts = {
            "starts of services": ", ".join(f"{m.name} {m.num_starts}" for m in fleet.members.values()),
            "starts of Valkey": fleet.num_valkey_starts,
        }
    finally:
        fleet.stop()
    watch.judge_ends()
    return make_report(load, faults, watch, seed=settings.seed, minutes=settings.minutes, facts=facts)


def _soak(
    settings: Settings, fleet: Fleet, load: Load, faults: Faults, watch: Watch, say: Callable[[str], None]
) -> None:
    length_s = settings.minutes * 60 / settings.num_windows
    load.start()
    began_s, paused_s, said_s = time.monotonic(), 0.0, time.monotonic()
    try:
        for window in range(1, settings.num_windows + 1):
            end_s = window * length_s
            # On a slow machine it is longer until all is up again that the next fault is for.
            while (at_s := time.monotonic() - began_s - paused_s) < end_s or faults.owes(end_s):
                fleet.tick()
                faults.tick(at_s)
                if time.monotonic() > said_s + SAY_S:
                    said_s = time.monotonic()
                    say(_progress(load))
                time.sleep(TICK_S)
            quiet_s = time.monotonic()
            _settle(fleet, load, faults, watch)
            watch.nothing_held()
            watch.read(at_s)
            if window == settings.num_windows:
                watch.judge()
            paused_s += time.monotonic() - quiet_s
            say(f"quiet: {_progress(load)}; {len(watch.problems)} problems")
            load.resume()
    finally:
        faults.finish()
        load.stop()


def _settle(fleet: Fleet, load: Load, faults: Faults, watch: Watch) -> None:
    """Let no new request begin, and have every fault undone and every service up."""
    until = time.monotonic() + HANG_S + 60
    while not (faults.quiet and fleet.all_ready and len(fleet.members) == fleet.num_members):
        if time.monotonic() > until:
            watch.problems.append("the mesh did not come to rest")
            break
        fleet.tick()
        faults.undo_due()
        time.sleep(TICK_S)
    if not load.pause(HANG_S + 10):
        watch.problems.append("requests did not end")
    fleet.wait_ready()


def _progress(load: Load) -> str:
    counted = ", ".join(f"{count} {verdict}" for verdict in Verdict if (count := load.counts[verdict]))
    return f"{load.num_requests} answers: {counted}"
