from collections.abc import Iterator

import pytest

from pdmesh.models.source import DEMO_MODEL
from pdmesh.openai.text import TextModel, load_text_model
from support.api_server import ApiServer, api_server


@pytest.fixture(scope="session")
def text() -> TextModel:
    """The demo model's tokenizer and chat template."""
    return load_text_model(DEMO_MODEL)


@pytest.fixture(scope="module")
def shared_server(text: TextModel) -> Iterator[ApiServer]:
    """A server for tests that leave nothing behind in it."""
    with api_server(text) as server:
        yield server
