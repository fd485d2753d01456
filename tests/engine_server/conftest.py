"""A prefill and a decode service that all tests of this folder share."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from support.engines import LoopThread, RunningEngine, loop_thread, start_engines
from support.tiny_models import make_tiny


@dataclass
class Pair:
    """Two engines with one model, and the loop they live on."""

    loop: LoopThread
    prefill: RunningEngine
    decode: RunningEngine
    model: str


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(make_tiny("llama_tied", tmp_path_factory.mktemp("tiny")))


@pytest.fixture(scope="session")
def pair(tiny_model: str) -> Iterator[Pair]:
    with loop_thread() as loop:
        prefill, decode = loop.run(start_engines(tiny_model, "prefill", "decode"))
        yield Pair(loop, prefill, decode, tiny_model)
        loop.run(prefill.stop())
        loop.run(decode.stop())
