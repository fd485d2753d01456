"""Keys and values of fewer bits, and steps of other numbers of threads, give the tokens that one engine alone gives."""

from __future__ import annotations

from pathlib import Path

import pytest

from support.mesh import mesh
from support.tiny_models import make_tiny

pytestmark = [pytest.mark.mesh, pytest.mark.timeout(300)]


def test_int8_keys_and_values_are_handed_over_between_engines_of_one_and_three_threads(tmp_path: Path) -> None:
    model = str(make_tiny("llama", tmp_path / "llama"))
    with mesh(
        model,
        engine_flags=("--kv-cache-dtype", "int8_per_token_head", "--kv-cache-memory-bytes", str(8 << 20)),
        prefill_flags=("--cpu-threads", "3"),
    ) as running:
        (prefill,), (decode,) = running.prefill, running.decode
        for length in (1, 32, 95, 300):
            prompt = [5 + index * 7 % 250 for index in range(length)]
            body = {"max_tokens": 24, "ignore_eos": True}
            alone = running.complete(prompt, prefill.http, **body)["choices"][0]["token_ids"]
            assert running.complete(prompt, **body)["choices"][0]["token_ids"] == alone
        assert decode.metric("pdmesh_transfers_total") == 4
        running.wait_nothing_held()
