"""Tokens between block sizes: every token once, in order, from where the source has it to where the destination wants it."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdmesh.protocol.token_pieces import TokenPiece, blocks_of, map_tokens

sizes = st.integers(1, 64)


@st.composite
def token_ranges(draw: st.DrawFn) -> range:
    start = draw(st.integers(0, 200))
    return range(start, start + draw(st.integers(0, 300)))


@given(token_ranges(), sizes, sizes)
def test_every_token_moves_once_and_in_order(tokens: range, source_size: int, destination_size: int) -> None:
    at_source, at_destination = [], []
    for piece in map_tokens(tokens, source_size, destination_size):
        assert piece.num_tokens > 0
        assert piece.source_slot + piece.num_tokens <= source_size
        assert piece.destination_slot + piece.num_tokens <= destination_size
        for offset in range(piece.num_tokens):
            at_source.append(piece.source_block * source_size + piece.source_slot + offset)
            at_destination.append(piece.destination_block * destination_size + piece.destination_slot + offset)
    assert at_source == list(tokens)
    assert at_destination == list(tokens)


@given(token_ranges(), sizes, sizes)
def test_a_piece_ends_only_where_a_block_does(tokens: range, source_size: int, destination_size: int) -> None:
    pieces = map_tokens(tokens, source_size, destination_size)
    for piece in pieces[:-1]:
        ends = (piece.source_slot + piece.num_tokens, piece.destination_slot + piece.num_tokens)
        assert ends[0] == source_size or ends[1] == destination_size


@given(token_ranges(), sizes)
def test_equal_sizes_move_block_by_block(tokens: range, size: int) -> None:
    pieces = map_tokens(tokens, size, size)
    assert [piece.source_block for piece in pieces] == list(blocks_of(tokens, size))
    assert all(
        (piece.source_block, piece.source_slot) == (piece.destination_block, piece.destination_slot) for piece in pieces
    )


def test_a_prefix_and_a_partial_last_block() -> None:
    def piece(source_block: int, source_slot: int, block: int, slot: int, num_tokens: int) -> TokenPiece:
        return TokenPiece(
            source_block=source_block,
            source_slot=source_slot,
            destination_block=block,
            destination_slot=slot,
            num_tokens=num_tokens,
        )

    assert map_tokens(range(32, 70), 16, 32) == (piece(2, 0, 1, 0, 16), piece(3, 0, 1, 16, 16), piece(4, 0, 2, 0, 6))
    assert map_tokens(range(16, 40), 32, 16) == (piece(0, 16, 1, 0, 16), piece(1, 0, 2, 0, 8))


@pytest.mark.parametrize("tokens", [range(-1, 4), range(0, 8, 2), range(8, 0, -1)])
def test_only_neighbouring_positions_are_tokens(tokens: range) -> None:
    with pytest.raises(ValueError, match="not neighbouring positions"):
        map_tokens(tokens, 16, 32)


@pytest.mark.parametrize("block_sizes", [(0, 16), (16, -1)])
def test_a_block_holds_a_token(block_sizes: tuple[int, int]) -> None:
    with pytest.raises(ValueError, match=f"block_size {min(block_sizes)}: must be at least 1"):
        map_tokens(range(4), *block_sizes)
