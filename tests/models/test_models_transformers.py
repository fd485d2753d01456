"""Every architecture against transformers' own forward, in float32: whole, in chunks, token by token, in mixed batches."""

import json
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from support.sequences import LoadedBackend, Sequence
from support.tiny_models import KINDS, SLIDING_WINDOW, Kind, make_tiny

with warnings.catch_warnings():
    # transformers and what it imports warn of their own deprecated calls while they load.
    warnings.simplefilter("ignore", DeprecationWarning)
    warnings.simplefilter("ignore", FutureWarning)
    from transformers import AutoModelForCausalLM

LENGTH = 75
VARIANTS: dict[str, tuple[Kind, dict[str, Any]]] = {
    "linear": ("llama", {"rope_scaling": {"rope_type": "linear", "factor": 3.0}}),
    "dynamic": ("llama", {"rope_scaling": {"rope_type": "dynamic", "factor": 3.0}}),
    "yarn": ("qwen3", {"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 256}}),
    "some layers slide": (
        "qwen2",
        {
            "use_sliding_window": True,
            "sliding_window": 11,
            "max_window_layers": 1,
            "layer_types": ["full_attention", "sliding_attention"],
        },
    ),
}


@pytest.fixture(scope="module", params=KINDS)
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator["Case"]:
    folder = make_tiny(request.param, tmp_path_factory.mktemp(request.param))
    loaded = LoadedBackend(str(folder))
    yield Case(request.param, folder, loaded)
    loaded.close()


class Case:
    def __init__(self, kind: Kind, folder: Path, loaded: LoadedBackend) -> None:
        self.loaded = loaded
        reference = load_reference(folder)
        if kind == "mistral":
            assert reference.config.sliding_window == SLIDING_WINDOW < LENGTH
        generator = torch.Generator().manual_seed(1)
        vocab_size = reference.config.vocab_size
        self.prompts = [torch.randint(0, vocab_size, (LENGTH,), generator=generator).tolist() for _ in range(3)]
        with torch.inference_mode():
            self.wanted = [reference(torch.tensor([prompt])).logits[0] for prompt in self.prompts]

    def check(self, found: torch.Tensor, wanted: torch.Tensor) -> None:
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)


def load_reference(folder: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")


def test_whole_prompt(case: Case) -> None:
    sequence = Sequence(case.prompts[0])
    case.check(case.loaded.step([(sequence, LENGTH)]), case.wanted[0])
    case.loaded.free(sequence)


def test_chunks_of_seven_then_one_by_one(case: Case) -> None:
    sequence = Sequence(case.prompts[1])
    counts = [7] * 8 + [1] * (LENGTH - 56)
    found = torch.cat([case.loaded.step([(sequence, count)]) for count in counts])
    case.check(found, case.wanted[1])
    case.loaded.free(sequence)


def test_rows_of_one_batch_do_not_mix(case: Case) -> None:
    first, second, third = sequences = [Sequence(prompt) for prompt in case.prompts]
    case.loaded.step([(first, 40), (second, 3)])
    found = case.loaded.step([(first, 1), (third, 33), (second, 1)])
    case.check(found[0], case.wanted[0][40])
    case.check(found[1:34], case.wanted[2][:33])
    case.check(found[34], case.wanted[1][3])
    found = case.loaded.step([(third, 1), (second, 20), (first, 1)], all_logits=False)
    case.check(found, torch.stack([case.wanted[2][33], case.wanted[1][23], case.wanted[0][41]]))
    for sequence in sequences:
        case.loaded.free(sequence)


def test_what_blocks_held_before_does_not_show(case: Case) -> None:
    case.loaded.pool.blocks[:] = 0xFF
    sequence = Sequence(case.prompts[2])
    found = torch.cat([case.loaded.step([(sequence, count)]) for count in (5, 1, 27, 1, 1, 40)])
    case.check(found, case.wanted[2])
    case.loaded.free(sequence)


@pytest.mark.parametrize("variant", VARIANTS)
def test_ways_of_reaching_further(variant: str, tmp_path: Path) -> None:
    kind, changes = VARIANTS[variant]
    folder = make_tiny(kind, tmp_path / "tiny")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | changes))
    prompt = list(range(100, 100 + LENGTH))
    with torch.inference_mode():
        wanted = load_reference(folder)(torch.tensor([prompt])).logits[0]
    loaded = LoadedBackend(str(folder))
    sequence = Sequence(prompt)
    found = torch.cat([loaded.step([(sequence, count)]) for count in (30, 44, 1)])
    loaded.close()
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)
    (folder / "config.json").write_text(json.dumps(config))
    loaded = LoadedBackend(str(folder))
    plain = loaded.step([(Sequence(prompt), LENGTH)])
    loaded.close()
    assert torch.allclose(plain, wanted, rtol=1e-4, atol=1e-4) == (variant == "dynamic")
