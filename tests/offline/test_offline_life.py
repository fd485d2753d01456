"""The life of an LLM: cheap to import, gone when closed, dropped, interrupted or left, and honest when its core dies."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import psutil
import pytest

import pdmesh
from pdmesh import LLM, SamplingParams
from pdmesh.errors import InternalError
from pdmesh.offline import PromptsFailed
from pdmesh.offline.options import OPTIONS, SERVICE_ONLY, engine_config
from pdmesh.offline.progress import ProgressBar
from support.offline import SETTINGS

GREEDY = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
LONG = SamplingParams(temperature=0, max_tokens=900, ignore_eos=True)
PROMPTS: list[list[int]] = [[5, 6, number] for number in range(20, 60)]


def core_pid(llm: LLM) -> int:
    return llm._engine.generator._core.pid


def num_running(llm: LLM) -> int:
    return len(llm._engine.generator._running)


def run_script(tiny: Path, body: str, *, timeout: float = 60) -> subprocess.CompletedProcess[str]:
    script = f"from pdmesh import LLM, SamplingParams\nimport sys\nllm = LLM({str(tiny)!r}, **{SETTINGS!r})\n"
    return subprocess.run(
        [sys.executable, "-c", script + textwrap.dedent(body)],
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )


def test_importing_pdmesh_is_cheap_and_its_exports_are_lazy() -> None:
    script = """
import sys, pdmesh
heavy = {name for name in ("torch", "transformers", "pydantic", "zmq", "pdmesh.offline") if name in sys.modules}
assert not heavy, heavy
pdmesh.LLM, pdmesh.SamplingParams, pdmesh.BeamSearchParams
assert "torch" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", script], check=True, timeout=60)
    with pytest.raises(AttributeError, match="no attribute 'LMM'"):
        pdmesh.LMM  # noqa: B018


def test_every_setting_of_an_engine_is_an_option_or_is_for_services() -> None:
    assert {"dtype", "max_model_len", "max_num_seqs", "enable_prefix_caching", "scheduling_policy"} <= set(OPTIONS)
    assert not SERVICE_ONLY - set(pdmesh.offline.options.EngineConfig.model_fields)
    config = engine_config("m", {"max_num_seqs": None})
    assert config.connector == []
    assert config.max_num_seqs == 0


def test_closing_ends_the_process_and_later_calls_say_so(tiny: Path) -> None:
    llm = LLM(str(tiny), **SETTINGS)
    pid = core_pid(llm)
    llm.close()
    llm.close()
    assert not psutil.pid_exists(pid)
    with pytest.raises(InternalError, match="this LLM is closed"):
        llm.generate([1], GREEDY)
    with pytest.raises(InternalError, match="this LLM is closed"):
        llm.reset_prefix_cache()


def test_the_last_reference_gone_ends_the_process(tiny: Path) -> None:
    llm = LLM(str(tiny), **SETTINGS)
    pid = core_pid(llm)
    llm.generate([1], GREEDY)
    del llm
    gc.collect()
    assert not psutil.pid_exists(pid)


def test_a_program_that_just_ends_leaves_no_process(tiny: Path) -> None:
    done = run_script(
        tiny,
        """
        print(llm._engine.generator._core.pid)
        print(len(llm.generate([5], SamplingParams(max_tokens=3, ignore_eos=True))[0].outputs[0].token_ids))
        """,
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    pid, num_tokens = done.stdout.split()
    assert num_tokens == "3"
    assert not psutil.pid_exists(int(pid))


def test_ctrl_c_aborts_everything_and_leaves_the_engine_usable(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with LLM(str(tiny), **SETTINGS) as llm:
        wanted = llm.generate(PROMPTS[:2], GREEDY)
        advance = ProgressBar.advance

        def interrupt(bar: ProgressBar, **numbers: int) -> None:
            advance(bar, **numbers)
            os.kill(os.getpid(), signal.SIGINT)

        # The first answer is there while the others have hundreds of tokens to go.
        monkeypatch.setattr(ProgressBar, "advance", interrupt)
        with pytest.raises(KeyboardInterrupt):
            llm.generate(PROMPTS, [GREEDY] + [LONG] * (len(PROMPTS) - 1))
        monkeypatch.undo()
        assert num_running(llm) == 0
        again = llm.generate(PROMPTS[:2], GREEDY)
        # What was aborted had hundreds of tokens to go, and would still run.
        assert llm._engine.generator.stats.num_running <= 2
        assert [each.outputs[0].token_ids for each in again] == [each.outputs[0].token_ids for each in wanted]


def test_ctrl_c_in_a_terminal_ends_program_and_core(tiny: Path) -> None:
    """A terminal sends it to both; the core must not end before its requests are aborted."""
    script = f"""
from pdmesh import LLM, SamplingParams
llm = LLM({str(tiny)!r}, **{SETTINGS!r})
print(llm._engine.generator._core.pid, flush=True)
params = SamplingParams(temperature=0, max_tokens=900, ignore_eos=True)
while True:
    llm.generate([[5, 6, number] for number in range(20, 60)], params)
"""
    with subprocess.Popen(
        [sys.executable, "-c", script],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as process:
        assert process.stdout is not None
        pid = int(process.stdout.readline())
        os.killpg(process.pid, signal.SIGINT)
        _, errors = process.communicate(timeout=60)
    assert process.returncode in (-signal.SIGINT, 1)
    assert errors.rstrip().endswith("KeyboardInterrupt")
    assert not psutil.pid_exists(pid)


def test_a_dead_core_fails_what_runs_and_what_comes_after(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with LLM(str(tiny), **SETTINGS) as llm:
        advance = ProgressBar.advance

        def kill(bar: ProgressBar, **numbers: int) -> None:
            advance(bar, **numbers)
            os.kill(core_pid(llm), signal.SIGKILL)

        monkeypatch.setattr(ProgressBar, "advance", kill)
        with pytest.raises(PromptsFailed, match="the engine core died: killed by signal 9") as failed:
            llm.generate(PROMPTS[:3], [GREEDY, LONG, LONG])
        assert failed.value.outputs[0] is not None
        with pytest.raises(InternalError, match="the engine core died"):
            llm.generate([1], GREEDY)
        with pytest.raises(InternalError, match="the engine core died"):
            llm.reset_prefix_cache()


def test_a_core_that_dies_while_it_resets_its_cache_is_told(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with LLM(str(tiny), **SETTINGS) as llm:
        # The order never comes to its ears.
        monkeypatch.setattr(llm._engine.generator._core, "send", lambda _: os.kill(core_pid(llm), signal.SIGKILL))
        with pytest.raises(InternalError, match="the engine core died"):
            llm.reset_prefix_cache()
        monkeypatch.undo()


def test_a_forked_child_is_told_that_the_engine_is_its_parents(tiny: Path) -> None:
    """It waited for a thread that a fork does not copy."""
    done = run_script(
        tiny,
        """
        import os
        child = os.fork()
        if not child:
            try:
                llm.generate([5], SamplingParams(max_tokens=3))
            except Exception as exc:
                print(type(exc).__name__, exc, flush=True)
            os._exit(0)
        os.waitpid(child, 0)
        print(len(llm.generate([5], SamplingParams(max_tokens=3, ignore_eos=True))[0].outputs[0].token_ids))
        """,
    )
    told, num_tokens = done.stdout.splitlines()
    assert told.startswith("InternalError this LLM belongs to process ")
    assert num_tokens == "3"


def test_a_seed_makes_a_whole_program_repeat_itself(tiny: Path) -> None:
    drawn: list[Any] = []
    for _ in range(2):
        with LLM(str(tiny), seed=11, **SETTINGS) as llm:
            outputs = llm.generate([[5], [5]], SamplingParams(max_tokens=8, ignore_eos=True))
            drawn.append([output.outputs[0].token_ids for output in outputs])
    assert drawn[0] == drawn[1]
    assert drawn[0][0] != drawn[0][1]


def test_lower_priority_numbers_go_first(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ended: list[int] = []
    monkeypatch.setattr(ProgressBar, "advance", lambda bar, *, num_in, num_out: ended.append(num_in))
    settings = SETTINGS | {"max_num_seqs": 1, "scheduling_policy": "priority"}
    with LLM(str(tiny), **settings) as llm:
        llm.generate([[9] * length for length in (1, 2, 3, 4)], GREEDY, priority=[3, 0, 2, 1])
    assert ended == [2, 4, 3, 1]
