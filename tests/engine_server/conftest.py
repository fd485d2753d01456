"""A prefill and a decode service that all tests of this folder share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from support.engines import Pair, running_pair
from support.tiny_models import make_tiny


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(make_tiny("llama_tied", tmp_path_factory.mktemp("tiny")))


@pytest.fixture(scope="session")
def pair(tiny_model: str) -> Iterator[Pair]:
    with running_pair(tiny_model) as made:
        yield made
