"""`pdmesh run-batch`: every line gets an answer, the same as over HTTP; unfinished runs go on."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import io
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from pdmesh.config import EngineConfig
from pdmesh.errors import ConfigError, InternalError, MeshError
from pdmesh.models.source import DEMO_MODEL
from pdmesh.offline.batch import command as batch_command
from pdmesh.offline.batch import main
from pdmesh.offline.batch.output import BatchOutput
from pdmesh.offline.engine import OfflineEngine
from pdmesh.openai.text import TextModel, load_text_model
from support.api_server import make_app, serve_in_thread
from support.echo_generator import EchoGenerator
from support.offline import SETTINGS

CHAT = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 3}


@pytest.fixture(scope="module")
def text() -> TextModel:
    return load_text_model(DEMO_MODEL)


class Batch:
    """Runs batches on a generator that needs no engine."""

    def __init__(self, folder: Path, text: TextModel, monkeypatch: pytest.MonkeyPatch) -> None:
        self.generator = EchoGenerator(tokens_per_delta=2)
        self.input, self.output = folder / "in.jsonl", folder / "out.jsonl"
        self.partial = folder / "out.jsonl.partial"

        @contextlib.asynccontextmanager
        async def engine(config: EngineConfig) -> AsyncIterator[OfflineEngine]:
            card = await self.generator.card()
            yield OfflineEngine(config=config, generator=self.generator, text=text, card=card)  # type: ignore[arg-type]

        monkeypatch.setattr(batch_command, "offline_engine", engine)

    def run(self, lines: list[Any], *flags: str) -> list[dict[str, Any]]:
        self.input.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))
        code = main(["-i", str(self.input), "-o", str(self.output), "--model", "echo", *flags])
        assert code == 0
        return self.answers(self.output)

    def answers(self, path: Path) -> list[dict[str, Any]]:
        return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.fixture
def batch(tmp_path: Path, text: TextModel, monkeypatch: pytest.MonkeyPatch) -> Batch:
    return Batch(tmp_path, text, monkeypatch)


def line(custom_id: Any, body: Any = None, url: str = "/v1/chat/completions", **fields: Any) -> dict[str, Any]:
    return {"custom_id": custom_id, "method": "POST", "url": url, "body": CHAT if body is None else body} | fields


def test_bodies_are_those_of_the_http_api(batch: Batch, text: TextModel) -> None:
    bodies = [
        ("/v1/chat/completions", CHAT | {"logprobs": True, "top_logprobs": 2}),
        ("/v1/completions", {"prompt": ["a", "b"], "max_tokens": 4, "echo": True, "return_token_ids": True}),
        ("/v1/completions", {"prompt": "x", "use_beam_search": True, "n": 2, "max_tokens": 3}),
        ("/v1/completions", {"prompt": "x", "temperature": 3}),
        ("/v1/completions", {"prompt": "x", "model": "other"}),
        ("/v1/chat/completions", {"messages": 5}),
        ("/v1/chat/completions", [1]),
    ]
    found = batch.run([line(str(number), body, url) for number, (url, body) in enumerate(bodies)])
    with serve_in_thread(make_app(text, EchoGenerator(tokens_per_delta=2))) as url:
        for number, (path, body) in enumerate(bodies):
            wanted = httpx.post(url + path, json=body)
            answer = found[number]
            assert answer["custom_id"] == str(number)
            assert answer["response"]["status_code"] == wanted.status_code
            assert without_names(answer["response"]["body"]) == without_names(wanted.json())
            assert answer["error"] == (None if wanted.status_code == 200 else wanted.json()["error"])
            if wanted.status_code == 200:
                assert answer["response"]["request_id"] in answer["response"]["body"]["id"]


def without_names(body: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in body.items() if name not in ("id", "created")}


def test_what_is_no_request_becomes_an_error_line_and_stops_nothing(batch: Batch) -> None:
    found = batch.run(
        [
            line("a"),
            "not json",
            "[1]",
            '{"custom_id": "\ud83d"'.encode("utf-8", "replace").decode(),
            "",
            line(None),
            line(""),
            line("x" * 513),
            line("a"),
            line("b", method="GET"),
            line("c", url="/v1/embeddings"),
            line("d", url=5),  # type: ignore[arg-type]
            line("e", CHAT | {"stream": True}),
            {"custom_id": "f", "method": "POST", "url": "/v1/completions"},
            line("g", CHAT | {"kv_transfer_params": {"do_remote_decode": True}}),
            line("z"),
        ]
    )
    told = [
        (answer["custom_id"], answer["response"]["status_code"], (answer["error"] or {}).get("param"))
        for answer in found
    ]
    assert told == [
        ("a", 200, None),
        *[(None, 400, None)] * 3,
        *[(None, 400, "custom_id")] * 3,
        ("a", 400, "custom_id"),
        ("b", 400, "method"),
        ("c", 404, "url"),
        ("d", 404, "url"),
        ("e", 400, "stream"),
        ("f", 400, "body"),
        ("g", 400, "kv_transfer_params"),
        ("z", 200, None),
    ]
    assert "line 2 is no JSON object" in found[1]["error"]["message"]
    assert found[7]["error"]["message"] == "custom_id 'a' is that of line 1 already"
    assert not batch.partial.exists()


def test_answers_keep_the_inputs_order_though_they_come_in_another(batch: Batch) -> None:
    longer_first = [line(str(number), CHAT | {"max_tokens": 1 + (number * 7) % 5}) for number in range(30)]
    found = batch.run(longer_first, "--max-concurrency", "4")
    assert [answer["custom_id"] for answer in found] == [str(number) for number in range(30)]


@pytest.mark.parametrize(("limit", "most"), [("1", 1), ("3", 3)])
def test_no_more_lines_run_at_once_than_allowed(batch: Batch, limit: str, most: int) -> None:
    running: list[int] = []
    is_full = asyncio.Event()
    generate = batch.generator.generate

    async def watched(request: Any) -> Any:
        async for delta in generate(request):
            running.append(batch.generator.num_running)
            # None ends before as many run as may; what more there would be comes meanwhile.
            if batch.generator.num_running == most:
                is_full.set()
            await is_full.wait()
            yield delta

    batch.generator.generate = watched  # type: ignore[method-assign, assignment]
    batch.run([line(str(number)) for number in range(8)], "--max-concurrency", limit)
    assert max(running) == most


def test_an_engine_that_dies_keeps_what_was_answered_and_the_next_run_goes_on(
    batch: Batch, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = [line("0"), line("1", CHAT | {"temperature": 9}), *[line(str(number)) for number in range(2, 6)]]
    generate = batch.generator.generate

    async def dying(request: Any) -> Any:
        if len(batch.generator.requests) == 3:
            batch.generator.healthy_now = False
            raise InternalError("the engine core died")
        async for delta in generate(request):
            yield delta

    batch.generator.generate = dying  # type: ignore[method-assign, assignment]
    with pytest.raises(MeshError, match="the engine core died"):
        batch.run(lines, "--max-concurrency", "1")
    assert "--resume" in capsys.readouterr().err
    assert not batch.output.exists()
    assert [answer["custom_id"] for answer in batch.answers(batch.partial)] == ["0", "1", "2", "3"]
    with pytest.raises(ConfigError, match="from a run that did not finish; go on from it with --resume"):
        batch.run(lines)
    # As a crash in the middle of a line leaves it.
    with batch.partial.open("ab") as file:
        file.write(b'{"id":"cut of')
    first = json.loads(batch.partial.read_text().splitlines()[0])
    batch.generator.healthy_now, batch.generator.generate = True, generate  # type: ignore[method-assign]
    batch.generator.requests.clear()
    found = batch.run(lines, "--resume")
    assert [answer["custom_id"] for answer in found] == ["0", "1", "2", "3", "4", "5"]
    assert [answer["response"]["status_code"] for answer in found] == [200, 400, 200, 200, 200, 200]
    assert found[0] == first
    assert len(batch.generator.requests) == 2
    assert not batch.partial.exists()


def test_standard_input_is_read_and_a_second_run_replaces_the_first(
    batch: Batch, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert len(batch.run([line("a"), line("b")])) == 2
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(json.dumps(line("c")).encode())))
    assert main(["-i", "-", "-o", str(batch.output), "--model", "echo"]) == 0
    assert [answer["custom_id"] for answer in batch.answers(batch.output)] == ["c"]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["-o", "out"], "input-file: none given"),
        (["-i", "in"], "output-file: none given"),
        (["-i", "in", "-o", "-"], "output-file: must be a file"),
        (["-i", "in", "-o", "/nowhere/at/all"], "the directory /nowhere/at does not exist"),
        (["-i", "in", "-o", "/dev/null"], "/dev/null is no regular file"),
        (["-i", "nothing", "-o", "out"], "nothing cannot be read"),
        (["-i", "in", "-o", "in"], "is the input file"),
        (["-i", "in", "-o", "out", "--port", "1"], "--port"),
        (["-i", "in", "-o", "out", "--max-concurrency", "-1"], "max-concurrency: .*got '-1'"),
        (["-i", "in", "-o", "out", "--block-size", "24"], "block-size 24"),
        (["-i", "in", "-o", "out", "--enforce-eager"], "enforce-eager is a flag of vLLM's"),
    ],
)
def test_wrong_settings_are_one_line(
    flags: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("in").write_text("")
    with pytest.raises(ConfigError, match=message) as refused:
        main([*flags, "--model", "echo"])
    assert "\n" not in refused.value.message
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in"]


def batch_run(tiny: Path, folder: Path) -> list[str]:
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in SETTINGS.items()]
    files = ["-i", str(folder / "in.jsonl"), "-o", str(folder / "out.jsonl")]
    return [sys.executable, "-m", "pdmesh", "run-batch", *files, "--model", str(tiny), *flags]


def test_the_command_runs_a_file_on_an_engine(tiny: Path, tmp_path: Path) -> None:
    body = {"prompt": [5, 6, 7], "max_tokens": 5, "ignore_eos": True, "temperature": 0, "model": str(tiny)}
    lines = [line(str(number), body, "/v1/completions") for number in range(20)]
    (tmp_path / "in.jsonl").write_text("\n".join(map(json.dumps, lines)))
    done = subprocess.run(batch_run(tiny, tmp_path), capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stderr == f"pdmesh run-batch: 20 answered, 0 failed, 0 kept: {tmp_path / 'out.jsonl'}\n"
    answers = [json.loads(text) for text in (tmp_path / "out.jsonl").read_text().splitlines()]
    texts = {answer["response"]["body"]["choices"][0]["text"] for answer in answers}
    assert len(answers) == 20
    assert len(texts) == 1
    assert answers[0]["response"]["body"]["usage"]["completion_tokens"] == 5


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_command_leaves_no_process_and_can_go_on(tiny: Path, tmp_path: Path, number: int) -> None:
    body = {"prompt": [5, 6, 7], "max_tokens": 900, "ignore_eos": True}
    lines = [line("first", body | {"max_tokens": 1}, "/v1/completions")]
    lines += [line(str(each), body, "/v1/completions") for each in range(100)]
    (tmp_path / "in.jsonl").write_text("\n".join(map(json.dumps, lines)))
    with subprocess.Popen(
        batch_run(tiny, tmp_path), stderr=subprocess.PIPE, text=True, start_new_session=True
    ) as process:
        wait_for_line(tmp_path / "out.jsonl.partial")
        os.killpg(process.pid, number)
        _, errors = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "interrupted; what was answered is in" in errors
    kept = [json.loads(text) for text in (tmp_path / "out.jsonl.partial").read_text().splitlines()]
    assert kept[0]["custom_id"] == "first"
    assert len(kept) < len(lines)
    assert not (tmp_path / "out.jsonl").exists()


def wait_for_line(path: Path) -> None:
    deadline = time.monotonic() + 60
    while not path.exists() or not path.read_bytes().endswith(b"\n"):
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_a_line_nested_too_deeply_is_answered_like_any_other(batch: Batch) -> None:
    """It ended the run, and every run after it."""
    deep = (
        '{"custom_id": "deep", "method": "POST", "url": "/v1/completions", "body": '
        + "[" * 100_000
        + "]" * 100_000
        + "}"
    )
    first, second, third = batch.run([line("a"), deep, line("b")])
    assert [each["response"]["status_code"] for each in (first, second, third)] == [200, 400, 200]
    assert second["error"]["message"] == "line 2 is nested too deeply"


def test_a_byte_order_mark_is_not_part_of_the_first_line(batch: Batch) -> None:
    answers = batch.run(["\ufeff" + json.dumps(line("a")), line("b")])
    assert [(each["custom_id"], each["response"]["status_code"]) for each in answers] == [("a", 200), ("b", 200)]


class FullDisk(io.BytesIO):
    """Takes so many bytes and no more."""

    def __init__(self, room: int) -> None:
        super().__init__()
        self.room = room

    def write(self, data: Any) -> int:
        if self.tell() + len(data) > self.room:
            raise OSError(errno.ENOSPC, "No space left on device")
        return super().write(data)


@pytest.mark.parametrize("room", [0, 1500])
def test_a_full_disk_is_one_line_that_names_the_file(
    batch: Batch, room: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    entered = BatchOutput.__enter__

    def enter(output: BatchOutput) -> BatchOutput:
        entered(output)
        output._file.close()
        output._file = FullDisk(room)
        return output

    monkeypatch.setattr(BatchOutput, "__enter__", enter)
    with pytest.raises(
        InternalError, match=r"output-file: .*out.jsonl.partial cannot be written \(No space left on device\)"
    ):
        batch.run([line(str(number)) for number in range(20)])
    assert ("go on from it with --resume" if room else "nothing was answered") in capsys.readouterr().err


def test_a_disk_that_does_not_take_the_whole_is_told_and_leaves_the_answers(
    batch: Batch, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fsync(fd: int) -> None:
        raise OSError(errno.EDQUOT, "Disk quota exceeded")

    monkeypatch.setattr(os, "fsync", fsync)
    with pytest.raises(InternalError, match=r"output-file: .*out.jsonl cannot be written \(Disk quota exceeded\)"):
        batch.run([line("a")])
    assert "go on from it with --resume" in capsys.readouterr().err
    monkeypatch.undo()
    assert [each["custom_id"] for each in batch.answers(batch.partial)] == ["a"]
    assert not batch.output.exists()
