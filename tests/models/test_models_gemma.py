"""Gemma 2 and 3, whose layers mix windows and full attention, as transformers configures, saves and computes them, in float32."""

import json
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from pdmesh.errors import ConfigError
from pdmesh.models.registry import parse_model_config
from pdmesh.models.source import ModelSource, read_config
from support.sequences import LoadedBackend, Sequence
from support.tiny_models import make_tiny

with warnings.catch_warnings():
    # transformers and what it imports warn of their own deprecated calls while they load.
    warnings.simplefilter("ignore", DeprecationWarning)
    warnings.simplefilter("ignore", FutureWarning)
    from transformers import Gemma2Config, Gemma2ForCausalLM, Gemma3ForCausalLM, Gemma3TextConfig

WINDOW, LENGTH, BLOCK = 24, 150, 16
SIZES: dict[str, Any] = {
    "vocab_size": 300,
    "hidden_size": 48,
    "intermediate_size": 96,
    "num_hidden_layers": 7,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "sliding_window": WINDOW,
    "query_pre_attn_scalar": 20,
    "max_position_embeddings": 512,
    "initializer_range": 0.3,
    "attn_implementation": "eager",
    # Tied, random weights repeat the last token for ever; the tiny checkpoints are tied.
    "tie_word_embeddings": False,
}
# Below this gap between the two best logits rounding may choose (DESIGN, promise 1).
MIN_TOP2_GAP = 1e-3


def make_gemma3(folder: Path) -> Any:
    rope = {
        "full_attention": {"rope_type": "linear", "factor": 4.0, "rope_theta": 20000.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 500.0},
    }
    # By default five layers have a window, the sixth has none, the seventh has one again.
    return _save(Gemma3ForCausalLM(Gemma3TextConfig(**SIZES, rope_parameters=rope)), folder)


def make_gemma2(folder: Path) -> Any:
    caps = {"attn_logit_softcapping": 4.0, "final_logit_softcapping": 6.0}
    return _save(Gemma2ForCausalLM(Gemma2Config(**SIZES, **caps)), folder)


def _save(model: Any, folder: Path) -> Any:
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if name.endswith("norm.weight"):
                weight.normal_(std=0.2)
    model.save_pretrained(folder)
    return model.eval()


@pytest.fixture(scope="module", params=[make_gemma2, make_gemma3], ids=["gemma2", "gemma3"])
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator["Case"]:
    torch.manual_seed(3)
    folder = tmp_path_factory.mktemp("gemma")
    reference = request.param(folder)
    loaded = LoadedBackend(str(folder), block_size=BLOCK, num_blocks=256)
    yield Case(reference, folder, loaded)
    loaded.close()


class Case:
    def __init__(self, reference: Any, folder: Path, loaded: LoadedBackend) -> None:
        self.folder, self.loaded = folder, loaded
        generator = torch.Generator().manual_seed(1)
        self.prompts = [torch.randint(0, 300, (LENGTH,), generator=generator).tolist() for _ in range(3)]
        with torch.inference_mode():
            self.wanted = [reference(torch.tensor([prompt])).logits[0] for prompt in self.prompts]
        self.reference = reference

    @torch.inference_mode()
    def greedy(self, prompt: list[int], num_tokens: int) -> list[int]:
        """Continue by the whole sequence anew, without a cache; stop before a choice that is too close."""
        tokens = list(prompt)
        while len(tokens) < len(prompt) + num_tokens:
            best = self.reference(torch.tensor([tokens])).logits[0, -1].topk(2)
            if best.values[0] - best.values[1] < MIN_TOP2_GAP:
                break
            tokens.append(int(best.indices[0]))
        return tokens[len(prompt) :]


def check(found: torch.Tensor, wanted: torch.Tensor) -> None:
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("chunk", [1, 5, 16, 31, 32, 149, 150])
def test_chunks_of_every_size(case: Case, chunk: int) -> None:
    sequence = Sequence(case.prompts[0])
    counts = [chunk] * (LENGTH // chunk) + [LENGTH % chunk] * (LENGTH % chunk > 0)
    check(torch.cat([case.loaded.step([(sequence, count)]) for count in counts]), case.wanted[0])
    case.loaded.free(sequence)


def test_greedy_tokens_beyond_the_window(case: Case) -> None:
    for length in (WINDOW - 2, LENGTH):
        prompt = case.prompts[1][:length]
        wanted = case.greedy(prompt, 40)
        assert len(wanted) > 10
        assert len(set(wanted)) > 3
        assert case.loaded.greedy(prompt, len(wanted)) == wanted


def test_rows_of_one_batch_do_not_mix(case: Case) -> None:
    first, second, third = sequences = [Sequence(prompt) for prompt in case.prompts]
    case.loaded.step([(first, 100), (second, 3)])
    found = case.loaded.step([(first, 1), (third, 77), (second, 1)])
    check(found, torch.cat([case.wanted[0][100:101], case.wanted[2][:77], case.wanted[1][3:4]]))
    found = case.loaded.step([(third, 1), (second, 60), (first, 1)], all_logits=False)
    check(found, torch.stack([case.wanted[2][77], case.wanted[1][63], case.wanted[0][101]]))
    for sequence in sequences:
        case.loaded.free(sequence)


@pytest.mark.parametrize("counts", [[LENGTH], [40, 1, 1, 60, 1, 1, 1, 45], [100] + [1] * 50])
def test_what_a_window_has_passed_may_be_anybodys(case: Case, counts: list[int]) -> None:
    """Blocks out of the window are freed, filled with NaN and soon another group's or sequence's."""
    dropping = LoadedBackend(str(case.folder), block_size=BLOCK, num_blocks=90, drops_blocks=True)
    dropping.pool.blocks[:] = 0xFF
    sequence, other = Sequence(case.prompts[2]), Sequence(case.prompts[0])
    found, kept = [], Sequence(case.prompts[2])
    for count in counts:
        rows = [(sequence, count)] + [(other, 1)] * (other.num_computed < LENGTH)
        step = dropping.step(rows)[:count]
        torch.testing.assert_close(step, case.loaded.step([(kept, count)]), rtol=1e-5, atol=1e-5)
        found.append(step)
    check(torch.cat(found), case.wanted[2])
    tables = {group.kind: blocks for group, blocks in zip(dropping.info.groups, sequence.blocks, strict=True)}
    if len(counts) > 1:
        assert tables["sliding"].count(-1) == (LENGTH - counts[-1] + 1 - WINDOW) // BLOCK > 2
    assert -1 not in tables["full"]
    case.loaded.free(kept)
    dropping.close()


def test_groups_are_of_one_size_and_named_by_their_rule(case: Case) -> None:
    groups = case.loaded.info.groups
    assert len({group.block_bytes for group in groups}) == 1
    assert len({group.fingerprint for group in groups}) == len(groups)
    assert sorted(layer for group in groups for layer in group.layers) == list(range(7))
    full = [group for group in groups if group.kind == "full"]
    assert {(group.kind, group.window) for group in groups} == {("full", 0), ("sliding", WINDOW)}
    assert full[0].layers == ((1, 3, 5) if isinstance(case.reference, Gemma2ForCausalLM) else (5,))


def test_lower_precision_is_near(case: Case) -> None:
    narrow = LoadedBackend(str(case.folder), dtype="bfloat16", block_size=BLOCK)
    found = narrow.step([(Sequence(case.prompts[0]), LENGTH)])
    assert (found - case.wanted[0]).norm() / case.wanted[0].norm() < 0.1
    narrow.close()


def test_old_and_new_spellings_of_a_configuration_are_one(tmp_path: Path) -> None:
    old = make_tiny("gemma3", tmp_path)
    config = json.loads((old / "config.json").read_text())
    wanted = parse_model_config(read_config(ModelSource("hf", old, "old")), "old")
    assert (wanted.rotary.theta, wanted.local_rotary.theta) == (50000.0, 1000.0)
    assert wanted.windows == (20, None, 20, None, 20)
    for key in ("rope_theta", "rope_local_base_freq", "sliding_window_pattern", "architectures"):
        del config[key]
    config["layer_types"] = ["sliding_attention", "full_attention"] * 2 + ["sliding_attention"]
    config["rope_parameters"] = {
        "full_attention": {"rope_type": "default", "rope_theta": 50000.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1000.0},
    }
    (old / "config.json").write_text(json.dumps(config))
    assert parse_model_config(read_config(ModelSource("hf", old, "new")), "new") == wanted


def test_what_a_configuration_does_not_say_is_as_transformers_has_it(tmp_path: Path) -> None:
    silent = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 12, "num_attention_heads": 4}
    for kind, config in (("gemma3_text", Gemma3TextConfig(**silent)), ("gemma2", Gemma2Config(**silent))):
        (tmp_path / "config.json").write_text(json.dumps(silent | {"model_type": kind, "vocab_size": 300}))
        found = parse_model_config(read_config(ModelSource("hf", tmp_path, kind)), kind)
        types = ["full_attention" if window is None else "sliding_attention" for window in found.windows]
        assert types == config.layer_types
        assert found.windows[0] == config.sliding_window
        assert (found.head_dim, found.num_kv_heads) == (config.head_dim, config.num_key_value_heads)
        assert found.max_positions == config.max_position_embeddings
        assert found.tied_embeddings is config.tie_word_embeddings is True
        assert found.attention_scale == config.query_pre_attn_scalar**-0.5
        assert found.attention_soft_cap == config.attn_logit_softcapping
        assert found.logits_soft_cap == config.final_logit_softcapping
        ropes = config.rope_parameters
        thetas = (
            (ropes["rope_theta"],) * 2 if kind == "gemma2" else tuple(rope["rope_theta"] for rope in ropes.values())
        )
        assert {found.rotary.theta, found.local_rotary.theta} == set(thetas)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"layer_types": ["full_attention"]}, "layer_types names 1 layers, num_hidden_layers is 5"),
        ({"layer_types": ["chunked_attention"] * 5}, "layer type 'chunked_attention' is not supported"),
        ({"sliding_window": 0}, "sliding_window must be null or a whole number of at least 1, is 0"),
        ({"sliding_window_pattern": 0}, "sliding_window_pattern must be a whole number of at least 1, is 0"),
        ({"query_pre_attn_scalar": 0}, "query_pre_attn_scalar must be a number more than 0, is 0"),
        ({"final_logit_softcapping": -1.0}, r"final_logit_softcapping must be a number more than 0, is -1\.0"),
        ({"use_bidirectional_attention": True}, "use_bidirectional_attention is not supported"),
        (
            {"hidden_activation": "relu"},
            "hidden_act 'relu' is not supported; supported: silu, swish, gelu_pytorch_tanh",
        ),
        ({"num_key_value_heads": [2, 2, 1, 2, 2]}, "num_key_value_heads differs between layers"),
        ({"head_dim": [32, 64]}, "head_dim differs between layers"),
        ({"num_hidden_layers": 0}, "num_hidden_layers must be a whole number of at least 1, is 0"),
        ({"rope_parameters": [1]}, "rope_parameters must be an object"),
        (
            {"rope_parameters": {"sliding_attention": {"rope_type": "longrope"}}},
            "rope type 'longrope' is not supported",
        ),
    ],
)
def test_what_is_not_supported_is_refused_by_name(tmp_path: Path, changes: dict[str, Any], expected: str) -> None:
    folder = make_tiny("gemma3", tmp_path)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | changes))
    with pytest.raises(ConfigError, match=expected):
        parse_model_config(read_config(ModelSource("hf", folder, "tiny")), str(folder))
