"""The CPU library as a backend: PyTorch's logits in float32, and rows that depend on nothing around them, in bfloat16 too."""

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import (
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from pdmesh.connector.pool import KVPool, PoolShape, create_pool_file, size_pool_file
from pdmesh.engine.backend import Backend, ModelInfo, ProgressCallback, StepBatch
from pdmesh.engine.cpu_backend import CpuBackend
from pdmesh.engine.step_logits import on_host
from pdmesh.engine.torch_backend import TorchBackend
from pdmesh.errors import ConfigError
from pdmesh.models.ggml_types import GGMLType
from pdmesh.models.kv_cache_dtype import KVCacheDtype
from support.tiny_gguf import make_tiny_gguf
from support.tiny_models import make_tiny

VOCABULARY, LENGTH, NUM_BLOCKS = 160, 150, 64
SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 20,
    "max_position_embeddings": 512,
}
KINDS = ("llama", "qwen3", "gemma3")
INT8_KV = KVCacheDtype.INT8_PER_TOKEN_HEAD


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pdmesh_kernels.cpu.weight_folder.cache_folder", lambda: tmp_path / "cache")


@pytest.fixture(scope="module", params=KINDS)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    match request.param:
        case "llama":
            made = LlamaForCausalLM(LlamaConfig(**SIZES, num_hidden_layers=2, attention_bias=True))
        case "qwen3":
            made = Qwen3ForCausalLM(Qwen3Config(**SIZES, num_hidden_layers=2, tie_word_embeddings=True))
        case _:
            made = Gemma3ForCausalLM(Gemma3TextConfig(**SIZES, num_hidden_layers=6, sliding_window=40))
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.05)
    folder = tmp_path_factory.mktemp("model")
    made.save_pretrained(folder)
    return folder


class Bound:
    """A backend with a pool, and sequences whose blocks are in no order."""

    def __init__(self, backend: Backend, model: Path, dtype: str) -> None:
        self.backend = backend
        self.info: ModelInfo = backend.load(str(model), dtype, None, ProgressCallback())
        shape = PoolShape(NUM_BLOCKS, self.info.groups[0].block_bytes)
        descriptor = create_pool_file("test")
        size_pool_file(descriptor, shape)
        self.pool = KVPool(descriptor, shape, writable=True)
        # Whatever a block held before must not matter.
        self.pool.blocks[:] = 0xFF
        backend.bind(self.pool)
        self._blocks = np.random.default_rng(0).permutation(NUM_BLOCKS).astype(np.int32)

    def logits(self, token_ids: list[int], start: int = 0, end: int = LENGTH) -> np.ndarray:
        """Compute tokens [start, end) behind what is there; return the logits of each."""
        return self.step([(0, token_ids, start, end)])

    def step(self, rows: list[tuple[int, list[int], int, int]]) -> np.ndarray:
        """The same for several: (number of the sequence, its tokens, start, end)."""
        ends = np.cumsum([end - start for _, _, start, end in rows])
        width, num_groups = -(-LENGTH // 32), len(self.info.groups)
        of_sequence = self._blocks[: NUM_BLOCKS // (width * num_groups) * width * num_groups].reshape(
            -1, num_groups, width
        )
        batch = StepBatch(
            token_ids=np.concatenate([np.array(ids[start:end], dtype=np.int64) for _, ids, start, end in rows]),
            positions=np.concatenate([np.arange(start, end, dtype=np.int64) for _, _, start, end in rows]),
            query_start=np.array([0, *ends], dtype=np.int64),
            context_len=np.array([start for _, _, start, _ in rows], dtype=np.int64),
            block_tables=[of_sequence[[row[0] for row in rows], group] for group in range(num_groups)],
            logits_index=np.arange(ends[-1], dtype=np.int64),
        )
        found = on_host(self.backend.forward(batch))
        if found.best_ids is not None:
            np.testing.assert_array_equal(found.best_ids, found.logits_RV.argmax(axis=1))
        return found.logits_RV

    def close(self) -> None:
        self.backend.close()
        self.pool.close()


@pytest.fixture
def token_ids() -> list[int]:
    return np.random.default_rng(1).integers(VOCABULARY, size=LENGTH).tolist()


def test_float32_logits_are_those_of_pytorch(model: Path, token_ids: list[int]) -> None:
    found = []
    for backend in (CpuBackend(2), TorchBackend(1)):
        with closing(Bound(backend, model, "float32")) as bound:
            found.append(bound.logits(token_ids))
    np.testing.assert_allclose(found[0], found[1], atol=2e-4 * np.abs(found[1]).max())


def test_bfloat16_is_close_to_float32(model: Path, token_ids: list[int]) -> None:
    found = []
    for dtype in ("bfloat16", "float32"):
        with closing(Bound(CpuBackend(1), model, dtype)) as bound:
            found.append(bound.logits(token_ids))
    error = np.linalg.norm(found[0] - found[1]) / np.linalg.norm(found[1])
    assert 0 < error < 0.05


@pytest.mark.parametrize("kv_cache_dtype", KVCacheDtype)
def test_chunks_batches_and_threads_change_no_bit_in_bfloat16(
    model: Path, token_ids: list[int], kv_cache_dtype: KVCacheDtype
) -> None:
    with closing(Bound(CpuBackend(1, kv_cache_dtype=kv_cache_dtype), model, "bfloat16")) as bound:
        whole = bound.logits(token_ids)
    with closing(Bound(CpuBackend(3, kv_cache_dtype=kv_cache_dtype), model, "bfloat16")) as bound:
        np.testing.assert_array_equal(in_chunks(bound, token_ids).view(np.uint32), whole.view(np.uint32))


def in_chunks(bound: Bound, token_ids: list[int]) -> np.ndarray:
    """The same logits by several steps, beside another sequence that goes on by steps of another length."""
    ends, other, parts = (1, 38, 39, 40, 104, LENGTH), token_ids[::-1], []
    for number, (start, end) in enumerate(zip((0, *ends), ends, strict=False)):
        beside = (1, other, 11 * number, 11 * (number + 1))
        parts.append(bound.step([beside, (0, token_ids, start, end)])[11:])
    return np.concatenate(parts)


@pytest.mark.parametrize("kind", [GGMLType.Q4_1, GGMLType.Q4_0], ids=str)
def test_int8_activations_are_close_and_depend_on_nothing_around_them(
    kind: GGMLType, token_ids: list[int], tmp_path: Path
) -> None:
    made = make_tiny_gguf(make_tiny("llama_tied", tmp_path / "made"), tmp_path / "model.gguf", kind=kind)
    found, infos = [], []
    for quantization in ("none", "int8_activations"):
        with closing(Bound(CpuBackend(1, quantization=quantization), made, "bfloat16")) as bound:
            found.append(bound.logits(token_ids))
            infos.append(bound.info)
    error = np.linalg.norm(found[1] - found[0]) / np.linalg.norm(found[0])
    assert 0 < error < 0.05
    with closing(Bound(CpuBackend(3, quantization="int8_activations"), made, "bfloat16")) as bound:
        np.testing.assert_array_equal(in_chunks(bound, token_ids).view(np.uint32), found[1].view(np.uint32))
    assert infos[0].fingerprint != infos[1].fingerprint
    assert infos[0].weights_fingerprint != infos[1].weights_fingerprint
    # What is packed is the same.
    assert len(list((tmp_path / "cache" / "weights").glob("*.weights"))) == 1


@pytest.mark.parametrize(("dtype", "words"), [("bfloat16", "no weights .* in 4 bits"), ("float32", "needs --dtype")])
def test_int8_activations_are_for_weights_in_four_bits(model: Path, dtype: str, words: str) -> None:
    with (
        closing(CpuBackend(1, quantization="int8_activations")) as backend,
        pytest.raises(ConfigError, match=f"int8_activations.* {words}"),
    ):
        backend.load(str(model), dtype, None, ProgressCallback())


def test_int8_kv_is_close_to_bfloat16(model: Path, token_ids: list[int]) -> None:
    found = []
    for kv_cache_dtype in KVCacheDtype:
        with closing(Bound(CpuBackend(1, kv_cache_dtype=kv_cache_dtype), model, "bfloat16")) as bound:
            found.append(bound.logits(token_ids))
    error = np.linalg.norm(found[1] - found[0]) / np.linalg.norm(found[0])
    assert 0 < error < 0.03


def test_int8_kv_generates_from_what_it_has_written(model: Path, token_ids: list[int]) -> None:
    prompt, generated = token_ids[:40], []
    with closing(Bound(CpuBackend(2, kv_cache_dtype=INT8_KV), model, "bfloat16")) as bound:
        logits = bound.logits(prompt, 0, len(prompt))[-1]
        for position in range(len(prompt), LENGTH):
            generated.append(int(logits.argmax()))
            logits = bound.logits(prompt + generated, position, position + 1)[0]
    with closing(Bound(CpuBackend(1, kv_cache_dtype=INT8_KV), model, "bfloat16")) as bound:
        whole = bound.logits(prompt + generated)
    assert whole[len(prompt) - 1 : -1].argmax(axis=1).tolist() == generated


def test_int8_kv_has_names_of_its_own_and_half_the_bytes(model: Path, tmp_path: Path) -> None:
    infos = []
    for kv_cache_dtype in KVCacheDtype:
        with closing(CpuBackend(1, kv_cache_dtype=kv_cache_dtype)) as backend:
            infos.append(backend.load(str(model), "bfloat16", None, ProgressCallback()))
    wide, narrow = infos
    assert wide.fingerprint != narrow.fingerprint
    assert wide.dtype == narrow.dtype == "bfloat16"
    for before, after in zip(wide.groups, narrow.groups, strict=True):
        assert before.fingerprint != after.fingerprint
        # 32 items in a head, padded; beside them four bytes of scale.
        assert after.block_bytes * 2 * 32 == before.block_bytes * (32 + 4)
    # The weights are the same, and are packed once.
    assert len(list((tmp_path / "cache" / "weights").glob("*.weights"))) == 1


def test_int8_kv_is_refused_beside_float32(model: Path) -> None:
    with (
        closing(CpuBackend(1, kv_cache_dtype=INT8_KV)) as backend,
        pytest.raises(ConfigError, match="kv-cache-dtype: int8_per_token_head needs --dtype bfloat16"),
    ):
        backend.load(str(model), "float32", None, ProgressCallback())


def test_the_second_start_maps_what_the_first_has_packed(model: Path, token_ids: list[int], tmp_path: Path) -> None:
    found = []
    for _ in range(2):
        with closing(Bound(CpuBackend(1), model, "bfloat16")) as bound:
            found.append(bound.logits(token_ids))
    np.testing.assert_array_equal(found[0], found[1])
    assert len(list((tmp_path / "cache" / "weights").glob("*.weights"))) == 1


@pytest.mark.parametrize(("dtype", "block_size", "word"), [("float16", None, "dtype"), ("auto", 16, "block-size 16")])
def test_what_the_library_cannot_do_is_refused_by_name(
    model: Path, dtype: str, block_size: int | None, word: str
) -> None:
    with closing(CpuBackend(1)) as backend, pytest.raises(ConfigError, match=word):
        backend.load(str(model), dtype, block_size, ProgressCallback())


def test_an_unknown_instruction_set_is_refused_with_those_there_are() -> None:
    with pytest.raises(ConfigError, match="avx2"):
        CpuBackend(1, isa="sse2")


@pytest.fixture(autouse=True)
def one_torch_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)
