"""The torch backend over KV groups: memory that a step needs, blocks copied, blocks missing, places that nobody writes."""

import functools
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from pdmesh.engine.backend import ProgressCallback, StepBatch
from pdmesh.engine.torch_backend import TorchBackend
from pdmesh.models.step_memory import BYTES_PER_LOGIT, peak_bytes
from pdmesh_kernels.checks import KernelArgumentError
from pdmesh_kernels.paged_attention import MAX_GROUP_KEYS
from support.sequences import LoadedBackend, Sequence
from support.tiny_models import Kind, make_tiny

PROMPT = list(range(40, 110))


@pytest.fixture
def hybrid(tmp_path: Path) -> Iterator[LoadedBackend]:
    loaded = LoadedBackend(str(make_tiny("gemma3", tmp_path)))
    yield loaded
    loaded.close()


# Bytes per gathered key: two KV heads' keys and values, and a score and its softmax of four heads where they are capped.
@pytest.mark.parametrize(
    ("kind", "key_bytes"),
    [("llama", 2 * 2 * 16 * 4), ("gemma2", 2 * 2 * 32 * 4 + 2 * 4 * 4), ("gemma3", 2 * 2 * 32 * 4)],
)
def test_a_step_takes_no_more_than_its_profile_and_not_much_less(kind: Kind, key_bytes: int, tmp_path: Path) -> None:
    loaded = LoadedBackend(str(make_tiny(kind, tmp_path)), num_blocks=512)
    for counts in ([300], [1] * 32, [100, 1, 1, 50]):
        rows = [(Sequence([7] * count), count) for count in counts]
        loaded.step(rows, all_logits=False)
        again = [(Sequence([7] * count), count) for count in counts]
        measured = peak_bytes(functools.partial(loaded.step, again, all_logits=False))
        profile = loaded.backend.profile(sum(counts), len(counts))
        sampling = len(counts) * loaded.info.vocab_size * (BYTES_PER_LOGIT - 4)
        assert measured <= profile - sampling
        assert profile - sampling - key_bytes * MAX_GROUP_KEYS <= measured + (256 << 10)
    loaded.close()


def test_the_profile_grows_by_tokens_and_rows_as_told() -> None:
    backend = TorchBackend(1)
    info = backend.load("smollm2-135m", "auto", None, ProgressCallback())
    base = backend.profile(512, 16)
    assert backend.profile(512, 17) - base == info.vocab_size * BYTES_PER_LOGIT
    # At least the feed-forward's fused projection and the gate's result, 1536 wide each half.
    assert (backend.profile(1024, 16) - base) / 512 > 3 * 1536 * 4
    backend.close()


def test_peak_counts_what_is_alive_at_once() -> None:
    kept = torch.zeros(1000)

    def run(function: Callable[[], object]) -> int:
        return peak_bytes(function)

    assert run(lambda: (kept.view(10, 100) + 1).sum()) == 4004
    assert run(lambda: kept.add_(1)) == 0
    assert run(lambda: [torch.ones(100) for _ in range(3)]) == 1200

    def one_after_another() -> None:
        for _ in range(3):
            torch.ones(100)

    assert run(one_after_another) == 400


def test_copied_blocks_carry_the_sequence_on(hybrid: LoadedBackend) -> None:
    first, second = Sequence(list(PROMPT)), Sequence(list(PROMPT))
    hybrid.step([(first, 50)])
    second.blocks = [[hybrid._free.pop() for _ in blocks] for blocks in first.blocks]
    second.num_computed = 50
    pairs = [
        pair
        for ours, theirs in zip(first.blocks, second.blocks, strict=True)
        for pair in zip(ours, theirs, strict=True)
    ]
    hybrid.backend.copy_blocks([])
    hybrid.backend.copy_blocks(pairs)
    hybrid.pool.blocks[[block for block, _ in pairs]] = 0
    found = hybrid.step([(second, 20)])
    third = Sequence(list(PROMPT))
    torch.testing.assert_close(found, hybrid.step([(third, 70)])[50:], rtol=1e-5, atol=1e-5)


def test_blocks_change_places_at_once(hybrid: LoadedBackend) -> None:
    hybrid.pool.blocks[1:4] = [[1], [2], [3]]
    hybrid.backend.copy_blocks([(1, 2), (2, 3), (3, 1)])
    assert hybrid.pool.blocks[1:4, 0].tolist() == [3, 1, 2]


def test_a_token_without_a_block_is_an_error_not_a_write_elsewhere(hybrid: LoadedBackend) -> None:
    hybrid.pool.blocks[:] = 7
    table = np.array([[3], [-1]], dtype=np.int32)
    batch = StepBatch(
        token_ids=np.array([5, 6]),
        positions=np.array([0, 0]),
        query_start=np.array([0, 1, 2]),
        context_len=np.array([0, 0]),
        block_tables=[np.array([[1], [2]], dtype=np.int32), table, table],
        logits_index=np.array([1]),
    )
    with pytest.raises(KernelArgumentError, match="lacks a block"):
        hybrid.backend.forward(batch)
    assert (hybrid.pool.blocks == 7).all()


def test_what_a_padded_block_has_room_for_holds_nobodys_numbers(hybrid: LoadedBackend) -> None:
    assert [len(group.layers) for group in hybrid.info.groups] == [2, 2, 1]
    hybrid.pool.blocks[:] = 0xFF
    sequence = Sequence(list(PROMPT))
    hybrid.step([(sequence, 33)])
    hybrid.step([(sequence, 37)])
    layers = hybrid.pool.blocks[sequence.blocks[2]].view(np.float32).reshape(5, 2, -1)
    assert (layers[:, 1] == 0).all()
    assert (layers[:, 0] != 0).any()
    assert not np.isnan(hybrid.pool.blocks[np.concatenate(sequence.blocks)].view(np.float32)).any()
