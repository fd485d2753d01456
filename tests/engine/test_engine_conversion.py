"""KV of a peer with another block size arrives by conversion: to the same tokens, in pieces, and whatever happens meanwhile."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdmesh.connector.base import WorkerConnector
from pdmesh.connector.grpc import GrpcConnector
from pdmesh.connector.shm import ShmConnector
from pdmesh.engine import conversion
from pdmesh.engine.conversion import GroupPart, pieces_of, plan_conversion
from pdmesh.engine.kv_groups import KVGroup
from pdmesh.engine.messages import Abort, ConnectPeer, DisconnectPeer, OfferSealed, ReleaseOffer, TransferEnded
from pdmesh.engine.rounded_blocks import RoundedBlocks
from pdmesh.errors import TransferFailed
from pdmesh.protocol.layout import Layout, most_source_blocks
from pdmesh.protocol.messages import GroupBlocks, KVMarks, KVSource
from pdmesh.protocol.token_pieces import blocks_of
from pdmesh.security import MeshSecret
from pdmesh_kernels.block_sum import sum_blocks
from support.core_harness import CoreHarness
from support.fake_backend import expected_tokens
from support.prompts import random_prompt

SECRET = MeshSecret("x" * 32)
LANE_BYTES = 4096


class Pair:
    """A prefill core and a decode core with blocks of other sizes."""

    def __init__(self, sizes: tuple[int, int], windows: list[int], *, is_async: bool = False, **limits: float) -> None:
        self.windows = windows
        self.prefill, self.decode = (
            CoreHarness(
                connectors={"shm": ShmConnector(peer_id, SECRET)},
                windows=windows,
                is_async=is_async,
                block_size=size,
                num_blocks=512,
                max_num_batched_tokens=16,
                lane_bytes=lane_bytes,
                **limits,  # type: ignore[arg-type]
            )
            for peer_id, size, lane_bytes in (("p@1", sizes[0], 0), ("d@1", sizes[1], LANE_BYTES))
        )
        shape = self.prefill.pool.shape
        self.layouts = [group.layout for group in self.prefill.groups if group.layout is not None]
        self.order = ConnectPeer(
            peer_id="p@1",
            connector="shm",
            metadata=self.prefill.metadata["shm"],
            num_blocks=shape.num_blocks,
            block_bytes=shape.block_bytes,
            layouts=self.layouts,
        )
        assert self.decode.connect(self.order).error == ""

    def sealed(self, prompt: list[int], offer_id: str = "offer", **options: object) -> OfferSealed:
        self.prefill.add(prompt, offer_id, prefill_only=True, offer_id=offer_id, **options)
        self.prefill.run()
        return next(each for each in self.prefill.sealed if each.offer_id == offer_id)

    def source(self, sealed: OfferSealed, transfer_id: str = "t", **changes: object) -> KVSource:
        fields: dict[str, object] = {
            "transfer_id": transfer_id,
            "peer_id": "p@1",
            "groups": sealed.groups,
            "num_tokens": sealed.num_tokens,
            "layouts": self.layouts,
        }
        return KVSource(**(fields | changes))  # type: ignore[arg-type]

    def expected(self, prompt: list[int], count: int = 8) -> list[int]:
        return expected_tokens(prompt, count, windows=tuple(self.windows))

    def check_nothing_left(self) -> None:
        assert self.decode.links.num_lanes_used == 0
        assert self.decode.num_used == 0

    @property
    def told(self) -> list[bytes]:
        """What the tier may have of decode."""
        return [key for each in self.decode.computed for key in each.keys]

    @property
    def ended(self) -> list[TransferEnded]:
        return self.decode.transfers


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that prompts of some blocks come in several."""
    monkeypatch.setattr(conversion, "PIECE_BYTES", 128)


SIZES = [(4, 8), (8, 4), (16, 4), (5, 7)]


@pytest.mark.parametrize("windows", [[0], [0, 6], [6]], ids=str)
@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("length", [1, 7, 16, 150])
def test_blocks_of_another_size_give_the_same_tokens(sizes: tuple[int, int], windows: list[int], length: int) -> None:
    pair = Pair(sizes, windows, is_async=length % 2 == 0)
    prompt = random_prompt(length)
    sealed = pair.sealed(prompt)
    first = pair.prefill.tokens("offer")
    pair.decode.add(prompt, emitted=[first], source=pair.source(sealed))
    pair.decode.run()
    assert first + pair.decode.tokens() == pair.expected(prompt)
    # Nothing of the prompt was computed.
    assert pair.decode.backend.steps[0].context_len.tolist() == [length]
    assert pair.decode.deltas_of()[0].kv_source == "shm+converted"
    [transfer] = pair.ended
    assert transfer.committed
    assert transfer.num_bytes > 0
    pair.check_nothing_left()


@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_the_last_token_may_be_computed_again(sizes: tuple[int, int]) -> None:
    pair = Pair(sizes, [0, 6])
    prompt = random_prompt(41)
    sealed = pair.sealed(prompt, max_tokens=1)
    pair.decode.add(prompt, source=pair.source(sealed), recompute_last=True)
    pair.decode.run()
    assert pair.decode.tokens() == pair.expected(prompt)


@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_what_is_cached_here_is_not_pulled_and_what_was_pulled_is_cached(sizes: tuple[int, int]) -> None:
    pair = Pair(sizes, [0])
    prompt = random_prompt(64)
    pair.decode.add(prompt[:30], "warm", max_tokens=1)
    pair.decode.run()
    sealed = pair.sealed(prompt)
    pair.decode.add(prompt, emitted=[pair.prefill.tokens("offer")], source=pair.source(sealed))
    pair.decode.run()
    block_bytes, size = pair.prefill.pool.shape.block_bytes, sizes[1]
    num_hit = 30 // size * size
    needed = len(blocks_of(range(num_hit, 64), sizes[0]))
    # A block that lies across two pieces comes twice.
    assert needed * block_bytes <= pair.ended[-1].num_bytes <= 2 * needed * block_bytes
    pair.decode.add(prompt, "again")
    pair.decode.run()
    assert pair.decode.tokens("again") == pair.expected(prompt)
    assert pair.decode.deltas_of("again")[0].cached_tokens == 63 // size * size


@pytest.mark.parametrize("sizes", [(4, 8), (2, 16)], ids=str)
def test_a_block_without_its_first_tokens_is_not_found_again(sizes: tuple[int, int]) -> None:
    """Of a window's first block only the tokens in the window are fetched; who needs the others must not get it."""
    pair = Pair(sizes, [0, 6])
    size = sizes[1]
    for length in range(size * 2, size * 3):
        prompt = random_prompt(length)
        sealed = pair.sealed(prompt, f"o{length}")
        pair.decode.add(
            prompt,
            f"r{length}",
            emitted=[pair.prefill.tokens(f"o{length}")],
            source=pair.source(sealed, f"t{length}"),
        )
        pair.decode.run()
        pair.prefill.send(ReleaseOffer(offer_id=f"o{length}"))
        # Others that go on from somewhere in its last blocks: in the full group they hit.
        for shared in range(size, length + 1):
            other = [*prompt[:shared], 3]
            pair.decode.add(other, f"s{length}-{shared}", max_tokens=2)
            pair.decode.run()
            assert pair.decode.tokens(f"s{length}-{shared}") == pair.expected(other, 2)


@pytest.mark.parametrize("policy", ["recompute", "fail"])
@pytest.mark.parametrize("fault", ["stale", "corrupt", "gone", "mismatch", "gap", "unsound"])
def test_what_cannot_be_fetched_ends_in_the_policy(fault: str, policy: str) -> None:
    pair = Pair((4, 8), [0])
    prompt = random_prompt(90)
    sealed = pair.sealed(prompt)
    [blocks] = sealed.groups
    changes: dict[str, object] = {"fail_policy": policy}
    if fault == "stale":
        # One of the last piece: those before are converted by then.
        pair.prefill.pool.bump(blocks.block_ids[-1:])
    elif fault == "corrupt":
        sums = sum_blocks(pair.prefill.pool.blocks, blocks.block_ids).tolist()
        summed = GroupBlocks(
            group=0, block_ids=blocks.block_ids, generations=blocks.generations, first_block=0, checksums=sums
        )
        changes["groups"] = [summed]
        pair.prefill.pool.blocks[blocks.block_ids[-1], 3] ^= 1
    elif fault == "gone":
        pair.decode.send(DisconnectPeer(peer_id="p@1"))
    elif fault == "mismatch":
        changes["layouts"] = []
        changes["layouts"] = [Layout(**{**_fields(pair.layouts[0]), "block_size": 16})]
    elif fault == "gap":
        short = GroupBlocks(group=0, block_ids=blocks.block_ids[1:], generations=blocks.generations[1:], first_block=1)
        changes["groups"] = [short]
    else:
        changes["groups"] = [GroupBlocks(group=0, block_ids=blocks.block_ids, generations=blocks.generations[1:])]
    pair.decode.add(prompt, emitted=[pair.prefill.tokens("offer")], source=pair.source(sealed, **changes))
    pair.decode.run()
    word = {"gone": "peer_lost", "unsound": "mismatch"}.get(fault, fault)
    assert [(each.committed, each.reason) for each in pair.ended] == [(False, word)]
    if policy == "recompute":
        assert pair.prefill.tokens("offer") + pair.decode.tokens() == pair.expected(prompt)
        assert pair.decode.deltas_of()[0].kv_source == f"recompute:{word}"
    else:
        assert pair.decode.deltas_of()[0].error_code == "TransferFailed"
    pair.check_nothing_left()


def _fields(layout: Layout) -> dict[str, object]:
    return {name: getattr(layout, name) for name in Layout.__dataclass_fields__}


def test_a_cancelled_one_leaves_nothing_and_the_next_is_right() -> None:
    pair = Pair((4, 8), [0])
    prompt = random_prompt(120)
    sealed = pair.sealed(prompt)
    first = pair.prefill.tokens("offer")
    pair.decode.add(prompt, emitted=[first], source=pair.source(sealed))
    pair.decode.send(Abort(request_id="r"))
    pair.decode.add(prompt, "r2", emitted=[first], source=pair.source(sealed, "t2"))
    pair.decode.run()
    assert first + pair.decode.tokens("r2") == pair.expected(prompt)
    assert {each.transfer_id: each.committed for each in pair.ended} == {"t": False, "t2": True}
    pair.check_nothing_left()


def test_many_at_once_share_the_lanes() -> None:
    pair = Pair((4, 8), [0])
    prompts = [random_prompt(40 + 7 * index) for index in range(12)]
    for index, prompt in enumerate(prompts):
        sealed = pair.sealed(prompt, f"o{index}")
        source = pair.source(sealed, f"t{index}")
        pair.decode.add(prompt, f"r{index}", emitted=[pair.prefill.tokens(f"o{index}")], source=source)
    pair.decode.run()
    for index, prompt in enumerate(prompts):
        assert pair.prefill.tokens(f"o{index}") + pair.decode.tokens(f"r{index}") == pair.expected(prompt)
    assert all(each.committed for each in pair.ended)
    pair.check_nothing_left()


def test_a_core_without_a_staging_area_refuses_peers_of_other_layouts() -> None:
    pair = Pair((4, 8), [0])
    answer = pair.prefill.connect(pair.order)
    assert "no staging area to convert them (kv-staging-bytes)" in answer.error


@pytest.mark.parametrize("make", [ShmConnector, GrpcConnector])
def test_a_peer_of_another_block_size_is_refused_where_it_tells_no_layouts(make: type[WorkerConnector]) -> None:
    pair = Pair((4, 8), [0])
    order = ConnectPeer(
        peer_id="p@1",
        connector="shm",
        metadata=pair.order.metadata,
        num_blocks=pair.order.num_blocks,
        block_bytes=pair.order.block_bytes,
    )
    assert "bytes, one of this pool" in pair.decode.connect(order).error


def layout(block_size: int, window: int = 0) -> Layout:
    return Layout(
        layers=(0,),
        window=window or None,
        num_layers=1,
        num_kv_heads=1,
        head_dim=1,
        dtype="float32",
        block_size=block_size,
    )


@given(
    st.integers(1, 40),
    st.integers(1, 40),
    st.integers(0, 200),
    st.integers(1, 200),
    st.integers(0, 30),
    st.integers(1, 4000),
)
def test_pieces_cover_every_token_once_and_fit_into_a_lane(
    source_size: int, target_size: int, start: int, length: int, room: int, piece_bytes: int
) -> None:
    source, target = layout(source_size), layout(target_size)
    lane_blocks = most_source_blocks(source, target) + room
    tokens = range(start, start + length)
    held, made = blocks_of(tokens, source_size), blocks_of(tokens, target_size)
    part = GroupPart(
        group=0,
        source=source,
        target=target,
        tokens=tokens,
        source_block_ids=[1000 + block for block in held],
        generations=[2000 + block for block in held],
        target_block_ids=[3000 + block for block in made],
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(conversion, "PIECE_BYTES", piece_bytes)
        pieces = list(pieces_of(part, lane_blocks=lane_blocks))
    assert (pieces[0].tokens.start, pieces[-1].tokens.stop) == (tokens.start, tokens.stop)
    assert all(one.tokens.stop == other.tokens.start for one, other in pairwise(pieces))
    assert [block for piece in pieces for block in piece.target_block_ids] == part.target_block_ids
    for piece in pieces:
        wanted = blocks_of(piece.tokens, source_size)
        assert part.source_block_ids[piece.source_places] == [1000 + block for block in wanted]
        assert len(wanted) <= lane_blocks
        assert piece.first_source_block == wanted.start


def test_a_source_of_another_number_of_groups_is_a_mismatch() -> None:
    groups = [KVGroup(4, layout=layout(4))]
    blocks = GroupBlocks(group=0, block_ids=[1], generations=[1])
    for changes in ({"layouts": []}, {"layouts": [layout(8)] * 2}, {"groups": []}, {"deadline_s": 0.0}):
        fields: dict[str, object] = {"groups": [blocks], "layouts": [layout(8)], "num_tokens": 8}
        source = KVSource(transfer_id="t", peer_id="p", **(fields | changes))  # type: ignore[arg-type]
        with pytest.raises(TransferFailed, match="mismatch"):
            plan_conversion(source, groups, num_hit_tokens=0, start=8)


def test_what_is_in_other_blocks_and_the_same_numbers_goes_to_the_tier() -> None:
    """It was kept from it as if it had been rounded."""
    pair = Pair((4, 8), [0], spill_usage=0.0)
    prompt = random_prompt(64)
    sealed = pair.sealed(prompt)
    first = pair.prefill.tokens("offer")
    pair.decode.add(prompt, emitted=[first], source=pair.source(sealed), store_to_tier=True, max_tokens=60)
    pair.decode.run()
    assert len(pair.told) >= 64 // 8


@pytest.mark.parametrize("is_preempted", [False, True])
def test_what_was_rounded_and_what_rests_on_it_stays_out_of_the_tier(is_preempted: bool) -> None:
    """Only the sequence that had fetched it knew, until it was preempted; others found it in the prefix cache."""
    pair = Pair((4, 8), [0], spill_usage=0.0)
    decode, prompt = pair.decode, random_prompt(64)
    sealed = pair.sealed(prompt)
    first = pair.prefill.tokens("offer")
    source = pair.source(sealed, marks=KVMarks(num_exact_tokens=0))
    decode.add(prompt, "a", emitted=[first], source=source, store_to_tier=True, max_tokens=60)
    decode.run()
    if is_preempted:
        decode.add(prompt, "again", emitted=[first], store_to_tier=True, max_tokens=60)
        for message in decode._inbox.drain():
            decode._core._handle(message)
        for _ in range(20):
            decode.step()
        [sequence] = decode.scheduler.state.running
        decode.scheduler._preempt(sequence)
        decode.run()
    else:
        rounded = decode.scheduler.state.kv.rounded
        num_rounded = sum(not rounded.num_exact([[block]]) for block in range(512))
        # All tokens but the last have KV.
        assert num_rounded == (64 + 59) // 8
        longer = prompt + random_prompt(40)
        decode.add(longer, "b", store_to_tier=True, max_tokens=40)
        decode.run()
        assert decode.deltas_of("b")[0].kv_source == "prefix"
        assert decode.tokens("b") == pair.expected(longer, 40)
        # Those behind them too: their own prefix may be computed anew, while these are still found by name.
        num_own = (len(longer) + 39) // 8 - 64 // 8
        assert sum(not rounded.num_exact([[block]]) for block in range(512)) == num_rounded + num_own
    assert pair.told == []
    # Another prompt's blocks are as exact as ever, though some of them held converted KV before.
    lengths = range(90, 130)
    for length in lengths:
        decode.add(random_prompt(length), f"c{length}", store_to_tier=True)
    decode.run()
    assert len(set(pair.told)) >= sum(length // 8 for length in lengths)


def test_what_rests_on_rounded_blocks_is_known_until_it_is_overwritten() -> None:
    rounded = RoundedBlocks()
    rounded.mark([[7, 8, 9]], 1)
    assert [rounded.num_exact([table]) for table in ([], [7], [7, 8], [5, 6, 9])] == [0, 1, 1, 2]
    # Only full blocks are named, so only they are found by others.
    rounded.spread([[7, 8, 20, 21]], 3)
    assert [rounded.num_exact([table]) for table in ([20], [21])] == [0, 1]
    rounded.copied(9, 30)
    rounded.copied(7, 31)
    assert [rounded.num_exact([table]) for table in ([30], [31])] == [0, 1]
    rounded.renew([8, 20])
    assert rounded.num_exact([[8, 20, 9]]) == 2


def test_a_layout_that_no_lane_holds_fails_the_pull_and_not_the_core() -> None:
    """Blocks of one token fit by their bytes; there were more of them than a lane counts."""
    pair = Pair((1, 1024), [0])
    prompt = random_prompt(30)
    sealed = pair.sealed(prompt)
    pair.decode.add(prompt, emitted=[pair.prefill.tokens("offer")], source=pair.source(sealed))
    pair.decode.run()
    assert pair.prefill.tokens("offer") + pair.decode.tokens() == pair.expected(prompt)
    [transfer] = pair.ended
    assert transfer.reason.startswith("error:ValueError: a lane holds")
    pair.check_nothing_left()
