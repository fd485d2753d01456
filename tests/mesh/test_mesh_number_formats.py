"""Numbers of fewer bits, and steps of other numbers of threads, give the tokens that one engine alone gives."""

from __future__ import annotations

from pathlib import Path

import pytest

from support.mesh import mesh
from support.tiny_models import make_tiny
from support.tiny_packed import make_tiny_packed

pytestmark = [pytest.mark.mesh, pytest.mark.timeout(300)]


@pytest.mark.parametrize(
    "flags",
    [("--kv-cache-dtype", "int8_per_token_head"), ("--quantization", "int8_activations")],
    ids=["keys and values", "activations"],
)
def test_int8_is_handed_over_between_engines_of_one_and_three_threads(flags: tuple[str, str], tmp_path: Path) -> None:
    made = make_tiny("llama", tmp_path / "llama")
    if "int8_activations" in flags:
        made, _ = make_tiny_packed(made, tmp_path, "gptq")
    with mesh(
        str(made),
        engine_flags=(*flags, "--kv-cache-memory-bytes", str(8 << 20)),
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
