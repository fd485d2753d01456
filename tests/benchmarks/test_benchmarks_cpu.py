"""The comparison with other servers: that it starts, alternates, judges and stops, on servers that only pretend."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "benchmarks"))

import cpu  # noqa: E402
import cpu_rows  # noqa: E402
from cpu_report import Report, RowResult, Sample  # noqa: E402
from cpu_rows import Goal  # noqa: E402
from load import make_prompts  # noqa: E402
from sides import Process, Running, Side, SideFailed, free_port  # noqa: E402

# Answers /health, and completions with as many events as were asked for, split where no event ends.
FAKE = """
import http.server, json, sys, time
class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    def log_message(self, *arguments): pass
    def do_GET(self):
        self.send_response(200); self.send_header("content-length", "0"); self.end_headers()
    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        events = [{"choices": [{"text": "x"}]} for _ in range(body["max_tokens"])]
        events.append({"choices": [], "usage": {"completion_tokens": body["max_tokens"] - int(sys.argv[2])}})
        lines = [b"data: " + json.dumps(event).encode() + b"\\n\\n" for event in events] + [b"data: [DONE]\\n\\n"]
        self.send_response(200); self.send_header("transfer-encoding", "chunked"); self.end_headers()
        for part in (part for line in lines for part in (line[:7], line[7:])):
            self.wfile.write(b"%x\\r\\n%s\\r\\n" % (len(part), part)); self.wfile.flush()
        self.wfile.write(b"0\\r\\n\\r\\n")
http.server.ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""


def fake_side(name: str, missing_tokens: int = 0, *, spins_idle: bool = False) -> Side:
    port = free_port()
    command = (sys.executable, "-c", FAKE, str(port), str(missing_tokens))
    return Side(name=name, processes=(Process(name=name, command=command, port=port),), spins_idle=spins_idle)


def sample(**numbers: float) -> Sample:
    return Sample(numbers=numbers, errors=[], load_average=0.0)


def test_a_goal_is_a_bound_on_the_side_that_its_number_says() -> None:
    assert Goal(key="itl_p50_ms", ratio=0.5).is_met(0.5)
    assert not Goal(key="itl_p50_ms", ratio=0.5).is_met(0.51)
    assert Goal(key="output_tokens_per_s", ratio=2.0).is_met(2.0)
    assert not Goal(key="output_tokens_per_s", ratio=2.0).is_met(1.99)


def test_the_table_tells_losses_and_what_was_not_measured(tmp_path: Path) -> None:
    row = next(row for row in cpu_rows.ROWS if row.name == "mixed")
    ours = [sample(itl_p99_ms=ms, output_tokens_per_s=100.0) for ms in (9.0, 20.0, 10.0)]
    peer = [sample(itl_p99_ms=ms, output_tokens_per_s=101.0) for ms in (100.0, 50.0, 300.0)]
    report = Report(rows=[RowResult(row=row, ours=ours, peer=peer)], left_out=["llama: its program was not named"])
    table = report.write(tmp_path).read_text()
    lines = {line.split(" | ")[1]: line for line in table.splitlines() if line.startswith(f"| {row.title}")}
    assert "mesh **10.0** (9.0-20.0) | vllm **100.0** (50.0-300.0) | 0.10 × | ≤ 0.2 × | met |" in lines["ITL p99 ms"]
    assert "0.99 × | ≥ 1 × | **missed** |" in lines["output tok/s"]
    assert lines["TTFT p50 ms"].endswith("| - | ≤ 1 × | not measured |")
    assert "- llama: its program was not named" in table


def test_rounds_alternate_and_results_have_every_round(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []
    makers: dict[str, Callable[[], Side]] = {
        "gguf": lambda: fake_side("gguf"),
        "llama": lambda: fake_side("llama", spins_idle=True),
    }
    monkeypatch.setattr(cpu, "make_sides", lambda options, report: makers)
    played = cpu.Fleet.round

    def recorded(fleet: cpu.Fleet, name: str, *arguments: object) -> Sample:
        order.append(name)
        result = played(fleet, name, *arguments)  # type: ignore[arg-type]
        spinning = psutil.Process(fleet._running["llama"]._children[0][1].pid)
        assert (spinning.status() == psutil.STATUS_STOPPED) == (name == "gguf")
        return result

    monkeypatch.setattr(cpu.Fleet, "round", recorded)
    flags = ["--model", "m", "--rows", "itl-4bit", "--runs", "2", "--output", str(tmp_path)]
    assert cpu.main([*flags, "--lock-file", str(tmp_path / "lock"), "--log-folder", str(tmp_path)]) == 0
    assert order == ["gguf", "llama", "gguf", "llama", "llama", "gguf"]
    results = json.loads(next(tmp_path.glob("*-cpu.json")).read_text())
    assert [len(results["rows"][0][side]) for side in ("ours", "peer")] == [2, 2]
    assert not [child for child in psutil.Process().children() if "http.server" in " ".join(child.cmdline())]


def test_tokens_that_are_missing_are_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        cpu, "make_sides", lambda options, report: {"gguf": lambda: fake_side("gguf", missing_tokens=1)}
    )
    flags = ["--model", "m", "--rows", "ttft-4bit", "--runs", "1", "--output", str(tmp_path)]
    assert cpu.main([*flags, "--log-folder", str(tmp_path)]) == 1
    assert "requests failed**; the first: 3 tokens instead of 4" in next(tmp_path.glob("*-cpu.md")).read_text()


def test_a_server_that_ends_at_once_is_told_with_its_log(tmp_path: Path) -> None:
    process = Process(name="broken", command=(sys.executable, "-c", "raise SystemExit(3)"), port=free_port())
    server = Running(Side(name="broken", processes=(process,)), tmp_path, timeout_s=20)
    with pytest.raises(SideFailed, match=r"broken ended with 3: .*broken\.log"):
        server.start()
    server.stop()


def test_commands_name_no_folder() -> None:
    process = Process(
        name="a", command=("/opt/x/vllm", "serve", "/data/model"), port=1, environment={"LD_PRELOAD": "/l/a.so:/l/b.so"}
    )
    assert Side(name="a", processes=(process,)).commands() == ["LD_PRELOAD=a.so:b.so vllm serve model"]


def test_prompts_of_rounds_and_rows_have_no_common_start() -> None:
    loads = [replace(row.load, seed=index + 1) for index, row in enumerate(cpu_rows.ROWS)]
    starts = [tuple(prompt[:8]) for load in loads for number in range(-1, 2) for prompt in make_prompts(load, number)]
    assert len(set(starts)) == len(starts)


def test_every_fourth_prompt_is_long() -> None:
    row = next(row for row in cpu_rows.ROWS if row.name == "mixed")
    assert [len(prompt) for prompt in make_prompts(row.load, 0)][:8] == [3000, 64, 64, 64, 3000, 64, 64, 64]
