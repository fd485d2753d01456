"""Custom logits processors: how they are found, checked and started, and what they may see."""

import sys
import types
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import ClassVar

import pytest
import torch

from pdmesh.engine import logits_processors
from pdmesh.engine.logits_processors import (
    LogitsProcessor,
    RowView,
    check_processors,
    load_processors,
    make_processors,
)
from pdmesh.errors import ConfigError, InternalError, InvalidRequest, MeshError
from pdmesh.protocol.messages import SamplingParams
from support.fake_backend import VOCAB_SIZE
from support.runner_harness import RunnerHarness


class Recorder(LogitsProcessor):
    """Keeps what it was shown, and forces the token that the request names."""

    shown: ClassVar[list[tuple[list[int], list[int], int]]] = []

    @classmethod
    def validate(cls, sampling: SamplingParams) -> None:
        if "force" in sampling.extra_args and not isinstance(sampling.extra_args["force"], int):
            raise InvalidRequest("force must be a token id", param="vllm_xargs")

    def is_active(self, sampling: SamplingParams) -> bool:
        return "force" in sampling.extra_args

    def apply(self, logits_V: torch.Tensor, row: RowView) -> None:
        self.shown.append((row.prompt.tolist(), row.output.tolist(), row.choice))
        for tokens in (row.prompt, row.output):
            with pytest.raises(ValueError, match="read-only"):
                tokens[:] = 0
        forced = int(row.extra_args["force"])  # type: ignore[arg-type]
        kept = logits_V[forced].clone()
        logits_V.fill_(-torch.inf)
        logits_V[forced] = kept


class Grumpy(LogitsProcessor):
    def __init__(self, vocab_size: int, device: torch.device) -> None:
        raise RuntimeError("no licence")

    @classmethod
    def validate(cls, sampling: SamplingParams) -> None:
        if sampling.extra_args.get("mood") == "wrong":
            raise ValueError("mood must not be wrong")
        if sampling.extra_args.get("mood") == "broken":
            raise KeyError("mood")

    def apply(self, logits_V: torch.Tensor, row: RowView) -> None:
        raise AssertionError


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> types.ModuleType:
    made = types.ModuleType("operators_own")
    made.Recorder, made.Grumpy, made.number = Recorder, Grumpy, 7  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "operators_own", made)
    Recorder.shown.clear()
    return made


def test_processors_are_found_by_name_and_as_entry_points_each_once(
    module: types.ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    installed = [EntryPoint("b", "operators_own:Recorder", logits_processors.ENTRY_POINT_GROUP)]
    monkeypatch.setattr(logits_processors, "entry_points", lambda group: installed)
    assert load_processors([]) == [Recorder]
    assert load_processors(["operators_own:Grumpy", "operators_own:Recorder"]) == [Recorder, Grumpy]


def test_without_any_there_are_none() -> None:
    assert load_processors([]) == []


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("operators_own", "not of the form"),
        (":Recorder", "not of the form"),
        ("no_such_module_at_all:Thing", "ModuleNotFoundError"),
        ("operators_own:Missing", "AttributeError"),
        ("operators_own:number", "not a subclass"),
        ("pathlib:Path", "not a subclass"),
    ],
)
def test_what_cannot_be_imported_is_named(module: types.ModuleType, name: str, told: str) -> None:
    with pytest.raises(ConfigError, match=told) as caught:
        load_processors([name])
    assert repr(name) in caught.value.message


def test_a_module_that_exits_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "leaves_at_once.py").write_text("raise SystemExit(3)\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ConfigError, match=r"'leaves_at_once:X' cannot be imported: SystemExit: 3"):
        load_processors(["leaves_at_once:X"])


def test_torch_has_as_many_threads_as_the_engine() -> None:
    """In the thread that steps, which starts afterwards, too."""
    before = torch.get_num_threads()
    try:
        make_processors([Recorder], VOCAB_SIZE, num_threads=3)
        with ThreadPoolExecutor(1) as steps:
            assert [torch.get_num_threads(), steps.submit(torch.get_num_threads).result()] == [3, 3]
    finally:
        torch.set_num_threads(before)


def test_one_that_fails_to_start_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    assert len(make_processors([Recorder], VOCAB_SIZE, num_threads=1)) == 1
    with pytest.raises(ConfigError, match=r"Grumpy failed to start: RuntimeError: no licence"):
        make_processors([Recorder, Grumpy], VOCAB_SIZE, num_threads=1)

    def leave(self: Grumpy, vocab_size: int, device: torch.device) -> None:
        raise SystemExit(3)

    monkeypatch.setattr(Grumpy, "__init__", leave)
    with pytest.raises(ConfigError, match=r"Grumpy failed to start: SystemExit: 3"):
        make_processors([Grumpy], VOCAB_SIZE, num_threads=1)


def test_requests_are_checked_by_all() -> None:
    classes: list[type[LogitsProcessor]] = [Recorder, Grumpy]
    check_processors(classes, SamplingParams())
    check_processors(classes, SamplingParams(extra_args={"force": 3, "unknown": "x"}))
    with pytest.raises(InvalidRequest, match="force must be"):
        check_processors(classes, SamplingParams(extra_args={"force": "three"}))
    with pytest.raises(InvalidRequest, match="mood must not be wrong"):
        check_processors(classes, SamplingParams(extra_args={"mood": "wrong"}))
    with pytest.raises(InternalError, match="Grumpy failed: KeyError"):
        check_processors(classes, SamplingParams(extra_args={"mood": "broken"}))


@pytest.mark.parametrize(
    ("raised", "kind", "message", "param"),
    [
        (SystemExit(3), InternalError, "Grumpy failed: SystemExit: 3", None),
        (KeyboardInterrupt(), InternalError, "Grumpy failed: KeyboardInterrupt", None),
        (RecursionError(), InternalError, "Grumpy failed: RecursionError", None),
        (InvalidRequest(7, param=8), InvalidRequest, "7", "8"),  # type: ignore[arg-type]
        (InvalidRequest("\ud800 is\nbad", param="\ud800"), InvalidRequest, "? is bad", "?"),
        (ValueError("x" * 9000), InvalidRequest, f"vllm_xargs: {'x' * 288}…", "vllm_xargs"),
    ],
)
def test_whatever_is_raised_over_a_request_is_an_answer_that_can_be_sent(
    raised: BaseException, kind: type[MeshError], message: str, param: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SystemExit ended the core; a message that cannot be encoded would have, too."""

    def validate(sampling: SamplingParams) -> None:
        raise raised

    monkeypatch.setattr(Grumpy, "validate", validate)
    with pytest.raises(kind) as caught:
        check_processors([Grumpy], SamplingParams())
    assert message in caught.value.message
    assert caught.value.param == param
    caught.value.message.encode()
    assert len(caught.value.message) < 400


def test_a_processor_sees_prompt_and_output_of_rows_that_ask_for_it(module: types.ModuleType) -> None:
    harness = RunnerHarness(processors=make_processors([Recorder], VOCAB_SIZE, num_threads=1))
    harness.add(0, [5, 6], choice=2, extra_args={"force": 9}, temperature=1.0)
    harness.add(1, [5, 6])
    tokens = harness.generate([0, 1], 3)
    harness.close()
    assert tokens[0] == [9, 9, 9]
    assert tokens[1] != [9, 9, 9]
    assert Recorder.shown == [([5, 6], [9] * count, 2) for count in range(3)]


def test_the_documented_processor_works(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = (Path(__file__).resolve().parents[2] / "docs" / "sampling.md").read_text()
    source = text.split("```python\n")[1].split("```")[0]
    (tmp_path / "my_rules.py").write_text(source)
    monkeypatch.syspath_prepend(tmp_path)
    classes = load_processors(["my_rules:EvenTokens"])
    with pytest.raises(InvalidRequest, match="even_until"):
        check_processors(classes, SamplingParams(extra_args={"even_until": -1}))
    harness = RunnerHarness(processors=make_processors(classes, VOCAB_SIZE, num_threads=1))
    for row in range(4):
        harness.add(row, [5, row], extra_args={"even_until": 3})
    tokens = harness.generate(list(range(4)), 10)
    harness.close()
    monkeypatch.delitem(sys.modules, "my_rules")
    assert all(token % 2 == 0 for row in tokens.values() for token in row[:3])
    assert any(token % 2 for row in tokens.values() for token in row[3:])
