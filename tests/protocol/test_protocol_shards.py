"""Heads between ranks: every destination rank gets each of its heads once, from a rank that holds it, the work shared out."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdmesh.errors import HandshakeRefused
from pdmesh.protocol.shards import HeadPiece, heads_of, map_heads

MAX_SIZE = 64


def fits(size: int, num_kv_heads: int) -> bool:
    return num_kv_heads % size == 0 or size % num_kv_heads == 0


@st.composite
def splits(draw: st.DrawFn) -> tuple[int, int, int]:
    """Source size, destination size and KV heads that fit."""
    num_kv_heads = draw(st.integers(1, MAX_SIZE))
    sizes = st.sampled_from([size for size in range(1, MAX_SIZE + 1) if fits(size, num_kv_heads)])
    return draw(sizes), draw(sizes), num_kv_heads


@given(splits())
def test_every_head_of_every_destination_rank_comes_once_from_a_rank_that_holds_it(split: tuple[int, int, int]) -> None:
    source_size, destination_size, num_kv_heads = split
    read: list[tuple[int, int]] = []
    for piece in map_heads(*split):
        source = heads_of(piece.source_rank, source_size, num_kv_heads)
        destination = heads_of(piece.destination_rank, destination_size, num_kv_heads)
        for offset in range(piece.num_heads):
            assert source[piece.source_head + offset] == destination[piece.destination_head + offset]
            read.append((piece.destination_rank, piece.destination_head + offset))
    wanted = [
        (rank, head)
        for rank in range(destination_size)
        for head in range(len(heads_of(rank, destination_size, num_kv_heads)))
    ]
    assert read == wanted


@given(splits())
def test_ranks_that_hold_the_same_head_serve_it_equally_often(split: tuple[int, int, int]) -> None:
    source_size, _, num_kv_heads = split
    served: dict[int, Counter[int]] = {head: Counter() for head in range(num_kv_heads)}
    for rank in range(source_size):
        for head in heads_of(rank, source_size, num_kv_heads):
            served[head][rank] = 0
    for piece in map_heads(*split):
        first = heads_of(piece.source_rank, source_size, num_kv_heads)[piece.source_head]
        for head in range(first, first + piece.num_heads):
            served[head][piece.source_rank] += 1
    for counts in served.values():
        assert max(counts.values()) - min(counts.values()) <= 1


@given(splits())
def test_neighbouring_heads_of_one_source_rank_are_one_piece(split: tuple[int, int, int]) -> None:
    pieces = map_heads(*split)
    assert len({(piece.source_rank, piece.destination_rank) for piece in pieces}) == len(pieces)


@given(splits())
def test_ranks_share_the_heads_out_in_order(split: tuple[int, int, int]) -> None:
    size, _, num_kv_heads = split
    held = [head for rank in range(size) for head in heads_of(rank, size, num_kv_heads)]
    assert held == sorted(held)
    assert set(Counter(held).values()) == {max(1, size // num_kv_heads)}
    assert set(held) == set(range(num_kv_heads))


def test_known_splits() -> None:
    def pieces(*numbers: tuple[int, int, int, int, int]) -> tuple[HeadPiece, ...]:
        return tuple(
            HeadPiece(source_rank=s, source_head=a, destination_rank=d, destination_head=b, num_heads=n)
            for s, a, d, b, n in numbers
        )

    assert map_heads(1, 2, 8) == pieces((0, 0, 0, 0, 4), (0, 4, 1, 0, 4))
    assert map_heads(2, 1, 8) == pieces((0, 0, 0, 0, 4), (1, 0, 0, 4, 4))
    assert map_heads(4, 4, 2) == pieces((0, 0, 0, 0, 1), (1, 0, 1, 0, 1), (2, 0, 2, 0, 1), (3, 0, 3, 0, 1))
    assert map_heads(4, 1, 2) == pieces((0, 0, 0, 0, 1), (2, 0, 0, 1, 1))
    # Neither size divides the other.
    assert map_heads(2, 3, 6) == pieces((0, 0, 0, 0, 2), (0, 2, 1, 0, 1), (1, 0, 1, 1, 1), (1, 1, 2, 0, 2))


@given(st.integers(1, MAX_SIZE), st.integers(1, MAX_SIZE))
def test_a_size_that_does_not_fit_is_refused_by_name(size: int, num_kv_heads: int) -> None:
    if fits(size, num_kv_heads):
        assert map_heads(size, 1, num_kv_heads)
        return
    for end, sizes in (("source", (size, 1)), ("destination", (1, size))):
        with pytest.raises(HandshakeRefused, match=rf"^{end} tensor-parallel size {size}: .* {num_kv_heads} KV heads"):
            map_heads(*sizes, num_kv_heads)


@pytest.mark.parametrize(
    ("sizes", "named"), [((0, 1, 4), "source"), ((1, -1, 4), "destination"), ((1, 1, 0), "source")]
)
def test_numbers_below_one_are_refused(sizes: tuple[int, int, int], named: str) -> None:
    with pytest.raises(HandshakeRefused, match=f"{named} .* must be at least 1"):
        map_heads(*sizes)


@pytest.mark.parametrize("rank", [-1, 4])
def test_a_rank_outside_is_no_rank(rank: int) -> None:
    with pytest.raises(ValueError, match=f"rank {rank}: not one of 0 ... 3"):
        heads_of(rank, 4, 8)
