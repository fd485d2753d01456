"""A Valkey of a test's own."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import redis

from pdmesh import embedded_valkey


@pytest.fixture
def valkey(tmp_path: Path) -> Iterator[embedded_valkey.EmbeddedValkey]:
    started = embedded_valkey.start(tmp_path / "v", maxmemory_bytes=64 << 20)
    yield started
    started.stop()


@pytest.fixture
def client(valkey: embedded_valkey.EmbeddedValkey) -> Iterator[redis.Redis]:
    with redis.Redis.from_url(valkey.url) as made:
        yield made
