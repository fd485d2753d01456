"""An engine that belongs to the mesh and is out of its mind: the tier refuses by name, holds nothing for it, serves others."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
import grpc.aio
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pdmesh.protocol import mesh_pb2 as pb
from support.tier import BLOCK_BYTES, LAYOUT, MODEL, RunningTier, chain, running_engine, running_tier

pytestmark = pytest.mark.timeout(120)

REFUSALS = {grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.FAILED_PRECONDITION}

numbers = st.one_of(st.integers(0, 9), st.sampled_from([1 << 31, (1 << 32) - 1]))
long_numbers = st.one_of(st.integers(0, 99), st.sampled_from([BLOCK_BYTES, 1 << 62, (1 << 64) - 1]))
texts = st.one_of(
    st.sampled_from(["", "t-1", "t-2", "engine-x@1", "127.0.0.1:1", "no host", "x" * 5000]),
    st.text(st.characters(exclude_categories=["Cs"]), max_size=6),
)
keys = st.lists(st.one_of(st.sampled_from(chain("prompt", 3)), st.binary(max_size=40)), max_size=4)
# Of its own layouts and models at most a few: each asks for a part of the memory.
layouts = st.sampled_from([LAYOUT, LAYOUT, "layout-mad", "", "x" * 300])
models = st.sampled_from([MODEL, MODEL, "", "x" * 300])
calls = st.one_of(
    st.builds(
        pb.LookupRequest,
        transfer_id=texts,
        consumer_id=texts,
        group=numbers,
        keys=keys,
        remaining_ms=st.integers(0, 50),
        layout_fingerprint=layouts,
        model_fingerprint=models,
    ),
    st.builds(
        pb.StoreRequest,
        owner_id=texts,
        owner_address=texts,
        group=numbers,
        keys=keys,
        block_ids=st.lists(numbers, max_size=4),
        generations=st.lists(long_numbers, max_size=4),
        layout_fingerprint=layouts,
        model_fingerprint=models,
        block_bytes=long_numbers,
    ),
    st.builds(
        pb.EndTransferRequest,
        transfer_id=texts,
        committed=st.booleans(),
        reason=texts,
        peer_id=texts,
        release_offer=texts,
    ),
    st.builds(pb.RenewTransfersRequest, transfer_ids=st.lists(texts, max_size=3)),
    st.builds(
        pb.BeginTransferRequest, transfer_id=texts, consumer_id=texts, offer_id=texts, digest=st.binary(max_size=70)
    ),
    st.builds(pb.ReadBlocksRequest, peer_id=texts, block_ids=st.lists(numbers, max_size=4)),
)


async def said(tier: RunningTier, call: Any) -> None:
    """Make one call; an answer or a refusal will do."""
    stub = tier.stub if isinstance(call, pb.LookupRequest | pb.StoreRequest) else tier.peer
    method = getattr(stub, type(call).__name__.removesuffix("Request"))
    made = method(call, timeout=20, metadata=tier.metadata)
    code, details = grpc.StatusCode.INVALID_ARGUMENT, "-"
    try:
        if isinstance(call, pb.ReadBlocksRequest):
            _ = [chunk async for chunk in made]
        else:
            await made
    except grpc.aio.AioRpcError as exc:
        code, details = exc.code(), exc.details() or ""
    assert code in REFUSALS, (call, code, details)
    assert 0 < len(details) < 4096


@settings(max_examples=15, suppress_health_check=list(HealthCheck))
@given(st.lists(calls, min_size=1, max_size=12))
def test_any_calls_cost_others_nothing(made: list[Any]) -> None:
    async def scenario() -> None:
        async with running_tier() as tier, running_engine("prefill") as prefill:
            keys = chain("sane", 3)
            prefill.fill([0, 1, 2], seed=1)
            await prefill.store(tier, keys, [0, 1, 2])
            await tier.until("slots_used", lambda value: value >= 3)
            for call in made:
                await said(tier, call)
            assert await tier.num_hits(keys) == 3
            for transfer_id in {getattr(call, "transfer_id", "") for call in made} - {""}:
                if len(transfer_id) <= 256:
                    await tier.end(transfer_id)
            assert (await tier.stats()).num_pinned == 0

    asyncio.run(scenario())
