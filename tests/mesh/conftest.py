"""Fixtures for tests that start whole meshes with the real SmolLM2 model."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from pdmesh.models.source import DEMO_MODEL
from support.mesh import Mesh, mesh


@pytest.fixture(scope="module")
def shm_mesh() -> Iterator[Mesh]:
    """1 prefill + 1 decode over shm, no tier."""
    with mesh(DEMO_MODEL) as running:
        yield running


@pytest.fixture(scope="module")
def aggregated() -> Iterator[Mesh]:
    """One decode engine behind the proxy."""
    with mesh(DEMO_MODEL, prefill=0) as running:
        yield running
