"""A process that may start no further thread, as where the host bounds them."""

from __future__ import annotations

import threading

import pytest

REFUSAL = "can't start new thread"


def refuse_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have every start of a thread fail as Python has it fail."""

    def start(thread: threading.Thread) -> None:
        raise RuntimeError(REFUSAL)

    monkeypatch.setattr(threading.Thread, "start", start)
