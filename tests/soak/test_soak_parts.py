"""The soak's own judgement: what it takes for right, wrong, an error and an early end; and a schedule that leaves nothing out."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from faults import beside
from soak.answers import Answer, Judged, Verdict
from soak.report import Report
from soak.schedule import CONNECTORS, ENGINE_FAULTS, OTHER_FAULTS, OTHERS_PER_BEAT, PUSHING, WAYS, plan
from soak.shapes import Choice, Shape, draw_shapes

SHAPE = Shape(
    number=0,
    path="/v1/completions",
    body={},
    num_prompt_tokens=5,
    choices=(Choice(token_ids=(7, 8, 9), text="abc", finish_reason="length", stop_reason=None),),
)
USAGE = {"prompt_tokens": 5, "completion_tokens": 3}
ERROR = {"error": {"message": "gone", "type": "ServiceUnavailableError", "code": 503}}


def chunk(ids: list[int], text: str, **more: Any) -> dict[str, Any]:
    return {"choices": [{"index": 0, "token_ids": ids, "text": text, **more}]}


WHOLE = chunk([7, 8, 9], "abc", finish_reason="length") | {"usage": USAGE}


def judge(parts: list[dict[str, Any]], *, streamed: bool = True, ended: bool = True) -> Judged:
    """Judge what a mesh would have sent."""
    answer = Answer(SHAPE)
    if streamed:

        async def lines() -> AsyncIterator[str]:
            for part in parts:
                yield f"data: {json.dumps(part)}"
            if ended:
                yield "data: [DONE]"

        asyncio.run(answer.take_stream(lines()))
    else:
        for part in parts:
            answer.take(part)
        answer.ended = ended
    return answer.judge()


def test_right_answers_are_right() -> None:
    assert judge([WHOLE], streamed=False).verdict is Verdict.RIGHT
    end = chunk([9], "c", finish_reason="length")
    assert judge([chunk([7, 8], "ab"), end, {"choices": [], "usage": USAGE}]).verdict is Verdict.RIGHT


@pytest.mark.parametrize(
    ("parts", "difference"),
    [
        ([chunk([7, 8, 6], "abc", finish_reason="length") | {"usage": USAGE}], "[7, 8, 6]"),
        ([chunk([7, 8, 9], "abd", finish_reason="length") | {"usage": USAGE}], "abd"),
        ([chunk([7, 8, 9], "abc", finish_reason="stop") | {"usage": USAGE}], "stop"),
        ([chunk([7, 8, 9], "abc", finish_reason="length", stop_reason="c") | {"usage": USAGE}], "'c'"),
        ([WHOLE | {"usage": USAGE | {"completion_tokens": 4}}], "usage (5, 4)"),
        ([chunk([7, 8], "ab") | {"usage": USAGE}], "None"),
        ([WHOLE, chunk([9], "c")], "goes on after its end"),
        ([chunk([6], "x"), ERROR], "[6]"),
        ([{"choices": [{"index": 1, "token_ids": [7], "text": "a"}]}], "choice 1 was not asked for"),
    ],
)
def test_whatever_differs_is_wrong_also_before_an_error(parts: list[dict[str, Any]], difference: str) -> None:
    judged = judge(parts)
    assert judged.verdict is Verdict.WRONG
    assert difference in judged.detail


def test_an_error_is_explicit_only_when_it_is_said() -> None:
    assert judge([ERROR], streamed=False, ended=False).verdict is Verdict.ERROR
    assert judge([chunk([7], "a"), ERROR]).verdict is Verdict.ERROR
    assert judge([chunk([7], "a")], ended=False).verdict is Verdict.TRUNCATED
    assert judge([WHOLE], ended=False).verdict is Verdict.TRUNCATED


def test_half_an_hour_has_every_fault_and_an_engine_fault_in_each_beat() -> None:
    events = plan(seed=1, duration_s=1800, every_s=30)
    assert events == plan(seed=1, duration_s=1800, every_s=30)
    assert events != plan(seed=2, duration_s=1800, every_s=30)
    done = [event.fault for event in events]
    assert set(done) == {*ENGINE_FAULTS, *OTHER_FAULTS}
    for beat in range(60):
        within = [event.fault for event in events if beat * 30 <= event.at_s < beat * 30 + 30]
        assert sum(fault in ENGINE_FAULTS for fault in within) == 1
        assert len(within) == 1 + OTHERS_PER_BEAT


def test_each_pair_of_engines_has_a_way_of_its_own_and_one_of_them_pushes() -> None:
    ways = {}
    for prefill in (name for name in CONNECTORS if name.startswith("prefill")):
        for decode in (name for name in CONNECTORS if name.startswith("decode")):
            both = [way for way in CONNECTORS[decode].split(",") if way in CONNECTORS[prefill].split(",")]
            ways[prefill, decode] = both[0]
    assert ways[PUSHING] == "nixl"
    assert sorted([*ways.values(), "push", "tier"]) == sorted(WAYS)


@pytest.mark.parametrize(("wrong", "verdict"), [(0, "PASSED"), (1, "FAILED")])
def test_the_report_and_the_page_that_quotes_it_say_what_was_counted(wrong: int, verdict: str, tmp_path: Path) -> None:
    counts = {str(each): 0 for each in Verdict} | {"right": 1000, "wrong": wrong}
    report = Report(seed=1, minutes=0.1, counts=counts, faults={"kill proxy": 1}, problems=[], facts={})
    path = tmp_path / "1-soak.json"
    table = report.write(path, at_least=1)
    assert table.splitlines()[0].endswith(verdict)
    assert f"{verdict}: {1000 + wrong} answers, 1000 right, {wrong} wrong" in table
    assert json.loads(path.read_text())["verdict"] == verdict
    quoted = "\n".join(beside.lines(tmp_path))
    assert f"**{verdict}**" in quoted
    assert ("1 answers wrong" in quoted) == bool(wrong)


def test_shapes_are_of_many_kinds() -> None:
    shapes = draw_shapes(seed=1, count=300)
    assert shapes == draw_shapes(seed=1, count=300)
    bodies = [shape.body for shape in shapes]
    for is_kind in (
        lambda body: "messages" in body,
        lambda body: body["temperature"] == 0,
        lambda body: body.get("n") == 2 and "seed" in body,
        lambda body: len(body.get("prompt", ())) > 512,
        lambda body: body["max_tokens"] == 1,
        lambda body: not body["ignore_eos"],
    ):
        assert sum(map(is_kind, bodies)) >= 10
