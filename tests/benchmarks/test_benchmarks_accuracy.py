"""The accuracy benchmark: its divergence is PyTorch's, and a tiny model's formats are compared with float32."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "benchmarks"))

from accuracy import OF_MODEL, Accuracy, markdown, measure, windows_of  # noqa: E402
from support.tiny_models import make_tiny  # noqa: E402


def test_divergence_agreement_and_perplexity_are_those_of_pytorch() -> None:
    torch.manual_seed(0)
    logits = torch.randn(70, 50).double() * 4
    found = logits + torch.randn(70, 50) * 0.1
    targets = torch.randint(50, (70,))
    accuracy = Accuracy(name="x")
    for rows in (slice(0, 40), slice(40, 70)):
        accuracy.add(logits[rows].log_softmax(1), found[rows].log_softmax(1), targets[rows])
    wanted = torch.nn.functional.kl_div(
        found.log_softmax(1), logits.log_softmax(1), log_target=True, reduction="none"
    ).sum(1)
    torch.testing.assert_close(torch.cat(accuracy.divergences), wanted)
    agreement = (logits.argmax(1) == found.argmax(1)).double().mean().item()
    assert accuracy.cells() == [
        "x",
        f"{wanted.mean():.5f}",
        f"{np.percentile(wanted.numpy(), 99):.4f}",
        f"{100 * agreement:.2f} %",
        f"{torch.nn.functional.cross_entropy(found, targets).exp():.3f}",
    ]


def test_windows_have_all_tokens_and_none_of_one_token() -> None:
    assert [list(window) for window in windows_of(range(9), 4)] == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert [list(window) for window in windows_of(range(10), 4)][-1] == [8, 9]


def test_a_tiny_model_in_every_format(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pdmesh_kernels.cpu.weight_folder.cache_folder", lambda: tmp_path / "cache")
    model = str(make_tiny("llama", tmp_path / "llama"))
    options = argparse.Namespace(threads=1, isa="auto", window=300, text=Path("words.txt"))
    token_ids = np.random.default_rng(0).integers(3, 90, size=700).tolist()
    forms = [OF_MODEL[0], OF_MODEL[0].with_int8_kv(), OF_MODEL[1]]
    found = measure(model, forms, token_ids, options)
    # 300, 300 and 100 tokens; the last of each has no next one.
    assert [accuracy.num_predictions() for accuracy in found] == [697] * 4
    reference, plain, narrow, int8 = (torch.cat(accuracy.divergences).mean().item() for accuracy in found)
    assert reference == 0
    assert 0 < plain < 0.01
    assert plain != narrow
    assert plain < int8 < 0.1
    table = markdown({model: found}, options)
    assert "llama, 697 predictions:" in table
    assert "| bf16, int8 KV |" in table
    assert "| float32 | 0.00000 | 0.0000 | 100.00 % |" in table
