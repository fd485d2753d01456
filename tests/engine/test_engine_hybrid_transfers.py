"""Models whose layers differ in what they keep: their prompts move between engines, group by group, to the same tokens."""

import pytest

from pdmesh.connector.shm import ShmConnector
from pdmesh.protocol.messages import GroupBlocks, KVSource
from pdmesh.security import MeshSecret
from support.core_harness import CoreHarness
from support.fake_backend import expected_tokens
from support.prompts import random_prompt

SECRET = MeshSecret("x" * 32)
WINDOWS = [0, 6]


@pytest.fixture(params=[False, True], ids=["sync", "async"])
def pair(request: pytest.FixtureRequest) -> tuple[CoreHarness, CoreHarness]:
    prefill, decode = (
        CoreHarness(
            connectors={"shm": ShmConnector(peer_id, SECRET)},
            windows=WINDOWS,
            is_async=request.param,
            num_blocks=128,
            max_num_batched_tokens=16,
        )
        for peer_id in ("p@1", "d@1")
    )
    decode.reach(prefill, "p@1")
    return prefill, decode


@pytest.mark.parametrize("length", [1, 4, 6, 7, 16, 17, 63, 150])
def test_only_what_a_window_needs_is_offered_and_pulled(pair: tuple[CoreHarness, CoreHarness], length: int) -> None:
    prefill, decode = pair
    prompt = random_prompt(length)
    sealed = prefill.offer(prompt)
    full, sliding = sealed.groups
    end = -(-length // 4)
    assert (full.first_block, len(full.block_ids)) == (0, end)
    # A consumer may compute the last token again, and sees the window before it.
    first = max(length - 1 - 6 + 1, 0) // 4
    assert (sliding.first_block, len(sliding.block_ids)) == (first, end - first)
    source = KVSource(transfer_id="t", peer_id="p@1", groups=sealed.groups, num_tokens=length)
    decode.add(prompt, emitted=[prefill.tokens()], source=source)
    decode.run()
    assert prefill.tokens() + decode.tokens() == expected_tokens(prompt, 8, windows=WINDOWS)
    assert decode.backend.steps[0].context_len.tolist() == [length]
    [transfer] = decode.transfers
    assert transfer.committed
    assert decode.num_used == 0


@pytest.mark.parametrize("length", [4, 9, 13, 16, 18, 21, 63])
def test_the_stock_flow_recomputes_the_last_token(pair: tuple[CoreHarness, CoreHarness], length: int) -> None:
    prefill, decode = pair
    prompt = random_prompt(length)
    sealed = prefill.offer(prompt, max_tokens=1)
    source = KVSource(transfer_id="t", peer_id="p@1", groups=sealed.groups, num_tokens=length)
    decode.add(prompt, source=source, recompute_last=True)
    decode.run()
    assert decode.tokens() == expected_tokens(prompt, 8, windows=WINDOWS)
    assert decode.deltas_of()[0].kv_source == "shm"


def test_what_is_cached_here_is_not_pulled(pair: tuple[CoreHarness, CoreHarness]) -> None:
    prefill, decode = pair
    prompt = random_prompt(40)
    decode.add(prompt[:34], "warm", max_tokens=1)
    decode.run()
    sealed = prefill.offer(prompt)
    source = KVSource(transfer_id="t", peer_id="p@1", groups=sealed.groups, num_tokens=40)
    decode.add(prompt, emitted=[prefill.tokens()], source=source)
    decode.run()
    assert prefill.tokens() + decode.tokens() == expected_tokens(prompt, 8, windows=WINDOWS)
    [transfer] = decode.transfers
    # Two blocks of the full group are missing, and two of the window's.
    assert (transfer.committed, transfer.num_bytes) == (True, 4 * decode.pool.shape.block_bytes)


def test_a_source_without_all_of_the_windows_blocks_is_a_gap(pair: tuple[CoreHarness, CoreHarness]) -> None:
    prefill, decode = pair
    prompt = random_prompt(24)
    full, sliding = prefill.offer(prompt).groups
    short = GroupBlocks(
        group=1,
        block_ids=sliding.block_ids[1:],
        generations=sliding.generations[1:],
        first_block=sliding.first_block + 1,
    )
    source = KVSource(transfer_id="t", peer_id="p@1", groups=[full, short], num_tokens=24)
    decode.add(prompt, source=source, recompute_last=True)
    decode.run()
    assert decode.transfers[0].reason == "gap"
    assert decode.tokens() == expected_tokens(prompt, 8, windows=WINDOWS)


def test_a_model_with_windows_has_nothing_for_the_tier(pair: tuple[CoreHarness, CoreHarness]) -> None:
    prefill, _ = pair
    prefill.add(random_prompt(40), store_to_tier=True)
    prefill.run()
    assert not prefill.computed
