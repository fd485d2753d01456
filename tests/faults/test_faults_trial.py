"""How a cell is judged: what may be tried again, and when a client may ask at another proxy."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from faults import trial
from faults.client import Client
from faults.injections import Injected
from faults.matrix import Answer, Cell, Column, Connector, Fault, Policy, Row, Target, all_cells, loses_the_proxy
from faults.trial import check

TOKENS = [1, 2, 3, 4, 5]
CELL = Cell(Row(Fault.EXPIRY), Column.OFFERED, Policy.ALONE, Connector.SHM)


@contextmanager
def answering(events: list[Any]) -> Iterator[tuple[str, int]]:
    """The address of a proxy that answers one request with these events, and then closes the connection."""
    data = b"HTTP/1.1 200 OK\r\n\r\n" + b"".join(f"data: {event}\n\n".encode() for event in events)

    def answer() -> None:
        connection, _ = listening.accept()
        with connection:
            while not connection.recv(65536).endswith(b"}"):
                pass
            connection.sendall(data)

    with socket.create_server(("127.0.0.1", 0)) as listening:
        thread = threading.Thread(target=answer, daemon=True)
        thread.start()
        yield listening.getsockname()


def event(*tokens: int) -> str:
    return json.dumps({"choices": [{"token_ids": tokens}]})


def test_a_stream_without_its_end_is_broken_unless_another_proxy_may_be_asked() -> None:
    with answering([event(1, 2, 3)]) as short, answering([event(*TOKENS), "[DONE]"]) as whole:
        one = Client([short], {}, timeout_s=10)
        one.wait_over()
        assert one.answer(TOKENS) is Answer.BROKEN
        with answering([event(1, 2, 3)]) as other_short:
            two = Client([other_short, whole], {}, timeout_s=10)
            two.wait_over()
            assert two.answer(TOKENS) is Answer.RIGHT


def test_another_proxy_is_asked_only_where_the_first_is_taken_away() -> None:
    rows = {cell.row for cell in all_cells() if loses_the_proxy(cell)}
    assert rows == {Row(Fault.KILL, Target.PROXY), Row(Fault.RESTART, Target.PROXY)}
    # What it has when it is told to end it ends.
    restarted = {cell.column for cell in all_cells() if cell.row.fault is Fault.RESTART and loses_the_proxy(cell)}
    assert restarted == {Column.BEFORE}


class FakeClient:
    told = route = ""
    seconds = 0.0

    def __init__(self, tokens: list[int]) -> None:
        self.tokens = tokens

    def wait_over(self) -> None:
        pass

    def answer(self, expected: list[int]) -> Answer:
        return Answer.RIGHT if self.tokens == expected else Answer.WRONG


class FakeStage:
    """A mesh that holds nothing; `broken` is what broke by itself."""

    def __init__(self) -> None:
        self.proxies: list[Any] = []
        self.nodes: list[Any] = []
        self.broken = ""
        self.num_mended = 0

    def defects(self) -> str:
        return self.broken

    def mend(self) -> None:
        self.num_mended += 1

    def wait_nothing_held(self, nodes: list[Any]) -> float:
        return 0.0


@pytest.fixture
def stage(monkeypatch: pytest.MonkeyPatch) -> FakeStage:
    """Each try reaches its moment and gets right tokens, unless a test says otherwise."""
    monkeypatch.setattr(trial, "prepare", lambda scene, cell: None)
    monkeypatch.setattr(trial, "reach", reaches(TOKENS))
    monkeypatch.setattr(trial, "inject", lambda scene, cell: Injected())
    monkeypatch.setattr(trial, "evidence", lambda cell: ())
    return FakeStage()


def reaches(tokens: list[int], failure: str = "") -> Callable[..., None]:
    def reach(scene: Any, row: Row, column: Column) -> None:
        scene.client = FakeClient(tokens)
        if failure:
            raise AssertionError(failure)

    return reach


def tried(stage: FakeStage, folder: Path) -> trial.Result:
    return check(stage, CELL, lambda body: TOKENS, folder)  # type: ignore[arg-type]


def test_a_missed_moment_is_tried_again_and_each_try_is_told(
    stage: FakeStage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    again = iter([reaches(TOKENS, "too late"), reaches(TOKENS)])
    monkeypatch.setattr(trial, "reach", lambda *arguments: next(again)(*arguments))
    result = tried(stage, tmp_path)
    assert (result.passed, result.reached, result.tries) == (True, True, ("not reached: too late",))
    monkeypatch.setattr(trial, "reach", reaches(TOKENS, "too late"))
    result = tried(stage, tmp_path)
    assert (result.passed, result.reached, len(result.tries)) == (False, False, trial.MAX_TRIES - 1)


def test_what_fails_within_the_fault_fails_the_cell_at_once(
    stage: FakeStage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def inject(scene: Any, cell: Cell) -> Injected:
        raise AssertionError("the offer's lease ends: not within 16 s")

    monkeypatch.setattr(trial, "inject", inject)
    result = tried(stage, tmp_path)
    assert (result.passed, result.reached, result.tries, stage.num_mended) == (False, True, (), 1)
    assert "lease ends" in result.fault


@pytest.mark.parametrize(("tokens", "broken"), [([1, 9], ""), (TOKENS, "nobody ended decode-0")])
def test_what_breaks_before_the_fault_is_no_missed_moment(
    stage: FakeStage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tokens: list[int], broken: str
) -> None:
    monkeypatch.setattr(trial, "reach", reaches(tokens, "too late"))
    stage.broken = broken
    result = tried(stage, tmp_path)
    assert (result.passed, result.reached, stage.num_mended) == (False, True, 1)
    assert (broken or Answer.WRONG) in result.fault
