from collections.abc import Iterator
from pathlib import Path

import pytest

from pdmesh import LLM
from support.offline import SETTINGS
from support.tiny_models import make_tiny


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model's folder."""
    return make_tiny("llama", tmp_path_factory.mktemp("offline"))


@pytest.fixture(scope="module")
def llm(tiny: Path) -> Iterator[LLM]:
    """An open LLM for tests that leave nothing behind in it."""
    with LLM(str(tiny), **SETTINGS) as opened:
        yield opened
