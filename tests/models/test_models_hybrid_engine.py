"""A whole engine core over a model that mixes sliding windows and full attention, against transformers in float32.

Real scheduler, block pool, rows and sampler: under chunks, prefix caching, async scheduling and preemption the greedy tokens
are those of transformers' forward over the whole sequence.
"""

import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from pdmesh.engine.backend import StepBatch
from pdmesh.engine.torch_backend import TorchBackend
from support.core_harness import CoreHarness
from support.tiny_models import SLIDING_WINDOW, make_tiny

with warnings.catch_warnings():
    # transformers and what it imports warn of their own deprecated calls while they load.
    warnings.simplefilter("ignore", DeprecationWarning)
    warnings.simplefilter("ignore", FutureWarning)
    from transformers import AutoModelForCausalLM

BLOCK, NUM_TOKENS = 8, 30
# Below this gap between the two best logits rounding may choose (DESIGN, promise 1).
MIN_TOP2_GAP = 1e-3


class PoisoningBackend(TorchBackend):
    """Before each step all blocks that nobody holds become NaN, so that whoever reads one shows it."""

    core: CoreHarness | None = None

    def forward(self, batch: StepBatch) -> torch.Tensor:
        if self.core is not None:
            blocks = self.core.scheduler.state.kv._pool
            # The next step, planned while this one runs, may have given up blocks that this one still reads.
            in_use = {int(block) for table in batch.block_tables for block in table.ravel()}
            free = [block for block in range(blocks.num_blocks) if blocks.is_free(block) and block not in in_use]
            self.core.pool.blocks[free] = 0xFF
        return super().forward(batch)


class Reference:
    """transformers, over prompts some of which share a beginning longer than the window."""

    def __init__(self, folder: Path) -> None:
        self.folder = str(folder)
        self._model: Any = AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, attn_implementation="eager"
        )
        generator = torch.Generator().manual_seed(5)
        shared, *others = (
            torch.randint(4, 300, (length,), generator=generator).tolist() for length in (50, 30, 9, 70, 21, 1)
        )
        self.prompts: list[list[int]] = [shared + others[0], shared + others[1], *others]
        self.wanted = [self._greedy(prompt) for prompt in self.prompts]
        # Whatever is compared below, it is long and beyond the window.
        assert sum(map(len, self.wanted)) > 0.8 * NUM_TOKENS * len(self.prompts)
        assert min(len(set(tokens)) for tokens in self.wanted) > 3

    @torch.inference_mode()
    def _greedy(self, prompt: list[int]) -> list[int]:
        tokens = list(prompt)
        while len(tokens) < len(prompt) + NUM_TOKENS:
            best = self._model(torch.tensor([tokens])).logits[0, -1].topk(2)
            if best.values[0] - best.values[1] < MIN_TOP2_GAP:
                break
            tokens.append(int(best.indices[0]))
        return tokens[len(prompt) :]


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Reference:
    torch.set_num_threads(1)
    return Reference(make_tiny("gemma3", tmp_path_factory.mktemp("gemma3")))


def test_the_model_mixes_rules(reference: Reference) -> None:
    core = make_core(reference)
    assert [group.kind for group in core.scheduler.state.kv.groups] == ["full", "sliding", "sliding"]


@pytest.fixture(autouse=True)
def close_cores() -> Iterator[None]:
    yield
    for core in list(CoreHarness.opened):
        core.close()


def make_core(reference: Reference, *, num_blocks: int = 256, **options: Any) -> CoreHarness:
    backend = PoisoningBackend(1)
    core = CoreHarness(
        backend=backend, model=reference.folder, block_size=BLOCK, num_blocks=num_blocks, max_model_len=128, **options
    )
    core.pool.blocks[:] = 0xFF
    if not options.get("enable_prefix_caching", True):
        # With it, blocks that nobody holds are still of use.
        backend.core = core
    return core


def check(core: CoreHarness, reference: Reference) -> None:
    for index, wanted in enumerate(reference.wanted):
        assert core.tokens(f"r{index}")[: len(wanted)] == wanted, f"request {index}"
    assert core.num_used == 0


def add_all(core: CoreHarness, reference: Reference) -> None:
    for index, prompt in enumerate(reference.prompts):
        core.add(prompt, f"r{index}", max_tokens=NUM_TOKENS)


@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("enable_prefix_caching", [False, True], ids=["uncached", "cached"])
@pytest.mark.parametrize("chunk", [7, 512])
def test_chunks(reference: Reference, chunk: int, enable_prefix_caching: bool, is_async: bool) -> None:
    core = make_core(
        reference, max_num_batched_tokens=chunk, enable_prefix_caching=enable_prefix_caching, is_async=is_async
    )
    add_all(core, reference)
    core.run()
    check(core, reference)


@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("enable_prefix_caching", [False, True], ids=["uncached", "cached"])
def test_preemption(reference: Reference, enable_prefix_caching: bool, is_async: bool) -> None:
    core = make_core(
        reference,
        num_blocks=50,
        max_num_batched_tokens=32,
        enable_prefix_caching=enable_prefix_caching,
        is_async=is_async,
    )
    add_all(core, reference)
    core.run()
    assert core.scheduler.state.counters.num_preemptions > 0
    check(core, reference)


def test_prefixes_are_found_in_every_group(reference: Reference) -> None:
    core = make_core(reference)
    for index, (prompt, wanted) in enumerate(zip(reference.prompts[:2], reference.wanted, strict=False)):
        core.add(prompt, f"r{index}", max_tokens=NUM_TOKENS)
        core.run()
        assert core.tokens(f"r{index}")[: len(wanted)] == wanted
    # The second prompt shares 50 tokens: six blocks, of which the windows need the last three.
    assert core.deltas_of("r0")[0].cached_tokens == 0
    assert core.deltas_of("r1")[0].cached_tokens == 50 // BLOCK * BLOCK
    conversation = reference.prompts[0] + core.tokens("r0")
    core.add([*conversation, 9], "on", max_tokens=8)
    core.run()
    assert core.deltas_of("on")[0].cached_tokens >= len(conversation) - 2 * BLOCK
    alone = make_core(reference, enable_prefix_caching=False)
    alone.add([*conversation, 9], "on", max_tokens=8)
    alone.run()
    assert core.tokens("on") == alone.tokens("on")


def test_a_window_holds_no_more_blocks_than_it_needs(reference: Reference) -> None:
    core = make_core(reference, enable_prefix_caching=False, max_num_batched_tokens=16)
    core.add(reference.prompts[4], "r", max_tokens=NUM_TOKENS)
    for message in core._inbox.drain():
        core._core._handle(message)
    most = 0
    while core.scheduler.state.requests:
        core.step()
        most = max(most, core.num_used)
    total = -(-(len(reference.prompts[4]) + NUM_TOKENS) // BLOCK)
    in_window = -(-(SLIDING_WINDOW - 1 + 2 * 16) // BLOCK) + 1
    assert total > in_window
    assert total <= most <= total + 2 * in_window


def test_choices_share_one_prefill_in_every_group(reference: Reference) -> None:
    core = make_core(reference, enable_prefix_caching=False, is_async=True)
    core.add(reference.prompts[0], "r", n=3, max_tokens=NUM_TOKENS)
    core.run()
    for choice in range(3):
        assert core.tokens("r", choice)[: len(reference.wanted[0])] == reference.wanted[0]
        assert core.deltas_of("r", choice)[0].cached_tokens == (choice > 0) * (len(reference.prompts[0]) - 1)


def test_a_model_whose_every_layer_has_one_window(tmp_path: Path) -> None:
    mistral = Reference(make_tiny("mistral", tmp_path))
    core = make_core(mistral, num_blocks=20, max_num_batched_tokens=16, enable_prefix_caching=False, is_async=True)
    assert [(group.kind, group.window) for group in core.scheduler.state.kv.groups] == [("sliding", SLIDING_WINDOW)]
    add_all(core, mistral)
    core.run()
    check(core, mistral)
