"""Waits for what another thread or process brings about."""

from __future__ import annotations

import time
from collections.abc import Callable

LOOK_EVERY_S = 0.005


def until(reached: Callable[[], object], timeout_s: float = 10.0) -> None:
    """Return when it is reached; fail when it is not in time."""
    end_s = time.monotonic() + timeout_s
    while not reached():
        assert time.monotonic() < end_s, "it did not come in time"
        time.sleep(LOOK_EVERY_S)
