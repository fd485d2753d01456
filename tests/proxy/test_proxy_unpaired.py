"""Engines that cannot disaggregate serve all the same, and the log says why they do not."""

from __future__ import annotations

import asyncio

import pytest

from support.fake_engine import FakeEngine
from support.fake_mesh import fake_mesh, token_request, tokens_of


def test_engines_that_cannot_pair_are_named_once_with_what_differs(caplog: pytest.LogCaptureFixture) -> None:
    async def body() -> None:
        prefill, decode = FakeEngine("prefill"), FakeEngine("decode")
        del decode.info.layout_fingerprints[:]
        decode.info.layout_fingerprints.append("layout-2")
        async with fake_mesh(prefill, decode) as mesh:
            # Whatever else changes is no news about these two.
            mesh.cluster._on_change()
            assert tokens_of(await mesh.collect(token_request()))

    asyncio.run(body())
    (warning,) = [record.getMessage() for record in caplog.records if "cannot hand over" in record.getMessage()]
    assert "KV layouts (block size, dtype) differ" in warning
    assert "layout-1" in warning
    assert "layout-2" in warning
