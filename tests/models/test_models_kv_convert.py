"""KV blocks from any layout to any other: equal dtypes keep every bit, others round once; wrong pairs are named."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from pdmesh.errors import HandshakeRefused, TransferFailed
from pdmesh.models.kv_convert import convert, pack, unpack
from pdmesh.models.kv_items import convert_items
from pdmesh.models.kv_layout import KVLayout
from pdmesh.protocol.layout import CPU_PACKING, DTYPES, PACKING, incompatibility
from pdmesh.protocol.shards import heads_of, map_heads
from pdmesh_kernels.cpu.kv_layout import KVItems

KINDS = [(packing, dtype) for packing, dtypes in DTYPES.items() for dtype in dtypes]
# Half of the distance between neighbouring numbers: relative, and where they lie evenly, near zero.
ROUNDING = {"float32": (0.0, 0.0), "bfloat16": (2.0**-8, 2.0**-134), "float16": (2.0**-11, 2.0**-25)}


def layout(
    packing: str = PACKING, dtype: str = "float32", block_size: int = 32, num_layers: int = 2, num_kv_heads: int = 2
) -> KVLayout:
    return KVLayout(
        layers=tuple(range(num_layers)),
        window=None,
        num_layers=num_layers,
        num_kv_heads=num_kv_heads,
        head_dim=6,
        dtype=dtype,
        block_size=block_size,
        packing=packing,
    )


@st.composite
def layouts(draw: st.DrawFn, kinds: list[tuple[str, str]], num_layers: int, num_kv_heads: int) -> KVLayout:
    packing, dtype = draw(st.sampled_from(kinds))
    sizes = [32, 64, 96] if packing == CPU_PACKING else [1, 5, 16, 32, 48]
    return layout(packing, dtype, draw(st.sampled_from(sizes)), num_layers, num_kv_heads)


@st.composite
def cases(draw: st.DrawFn, *, same_dtype: bool) -> tuple[KVLayout, KVLayout, int, range, np.random.Generator]:
    """Source, target, the index of the first source block, and tokens in two or so blocks of it."""
    model = draw(st.integers(1, 2)), draw(st.integers(1, 3))
    source = draw(layouts(KINDS, *model))
    kinds = [kind for kind in KINDS if (kind[1] == source.dtype) == same_dtype]
    target = draw(layouts(kinds, *model))
    first_block, num_blocks = draw(st.integers(0, 3)), draw(st.integers(1, 3))
    start = first_block * source.block_size
    end = start + num_blocks * source.block_size
    bounds = sorted(draw(st.tuples(st.integers(start, end), st.integers(start, end))))
    return source, target, first_block, range(*bounds), np.random.default_rng(draw(st.integers(0, 2**32)))


def draw_blocks(source: KVLayout, num_blocks: int, random: np.random.Generator) -> NDArray[np.uint8]:
    """Numbers of all sizes that every dtype can hold, zeros among them."""
    shape = (num_blocks, *source.block_shape)
    sizes = 10.0 ** random.integers(-9, 4, (*shape[:-1], 1))
    floats = (random.standard_normal(shape) * sizes * (random.random(shape) > 0.1)).astype(np.float32)
    return pack(convert_items(KVItems(items=floats, scales=None), "float32", source.dtype), source)


def by_token(items: KVItems) -> list[NDArray[Any]]:
    """[tokens, L, J, 2, D], and the scales' [tokens, L, J, 2] where there are any."""
    flat = [np.moveaxis(items.items, 4, 1).reshape(-1, *items.items.shape[1:4], items.items.shape[-1])]
    if items.scales is not None:
        flat.append(np.moveaxis(items.scales, 4, 1).reshape(-1, *items.scales.shape[1:4]))
    return flat


def numbers(items: KVItems, dtype: str) -> NDArray[np.float64]:
    """By token, in double precision."""
    codes, *scales = by_token(items)
    if dtype == "bfloat16":
        return torch.from_numpy(codes.copy()).view(torch.bfloat16).double().numpy()
    exact = codes.astype(np.float64)
    return exact * scales[0][..., None].astype(np.float64) if scales else exact


@settings(max_examples=60)
@given(cases(same_dtype=True))
def test_equal_dtypes_keep_every_bit(case: tuple[KVLayout, KVLayout, int, range, np.random.Generator]) -> None:
    source, target, first_block, tokens, random = case
    num_blocks = -(-tokens.stop // source.block_size) - first_block
    # Any bits: NaN and its payloads, infinities, scales that no quantiser makes.
    drawn = random.integers(0, 256, (max(1, num_blocks), source.block_bytes + 7), np.uint8)
    made = convert(drawn, source, target, tokens=tokens, first_block=first_block)
    before, after = unpack(drawn, source), unpack(made, target) if tokens else None
    assert made.shape[1] == target.block_bytes
    if after is None:
        assert len(made) == 0
        return
    offset = tokens.start - first_block * source.block_size
    new_offset = tokens.start % target.block_size
    for old, new in zip(by_token(before), by_token(after), strict=True):
        kept = new[new_offset : new_offset + len(tokens)]
        assert kept.tobytes() == old[offset : offset + len(tokens)].tobytes()
        assert not any(new[:new_offset].tobytes())
        assert not any(new[new_offset + len(tokens) :].tobytes())
        assert len(new) - new_offset - len(tokens) < target.block_size


@settings(max_examples=60)
@given(cases(same_dtype=False))
def test_other_dtypes_round_once(case: tuple[KVLayout, KVLayout, int, range, np.random.Generator]) -> None:
    source, target, first_block, tokens, random = case
    if not tokens:
        return
    num_blocks = -(-tokens.stop // source.block_size) - first_block
    blocks = draw_blocks(source, num_blocks, random)
    made = unpack(convert(blocks, source, target, tokens=tokens, first_block=first_block), target)
    offset = tokens.start - first_block * source.block_size
    exact = numbers(unpack(blocks, source), source.dtype)[offset : offset + len(tokens)]
    new_offset = tokens.start % target.block_size
    rounded = numbers(made, target.dtype)
    got = rounded[new_offset : new_offset + len(tokens)]
    # Codes times scales are computed in float32.
    float32 = np.abs(exact) * 2.0**-22
    if target.dtype == "int8":
        allowed = np.abs(exact).max(axis=-1, keepdims=True) / 127 * 0.5 * (1 + 1e-4) + float32
    else:
        relative, near_zero = ROUNDING[target.dtype]
        allowed = np.abs(exact) * relative + near_zero + (float32 if source.dtype == "int8" else 0)
    assert (np.abs(got - exact) <= allowed).all()
    assert not rounded[:new_offset].any()
    assert not rounded[new_offset + len(tokens) :].any()


@given(st.lists(st.floats(width=32), min_size=1, max_size=64))
# Halfway between two numbers of bfloat16, and of float16: once the lower one is even, once the upper.
@example([1 + 2.0**-8, 1 + 3 * 2.0**-8, 1 + 2.0**-11, 1 + 3 * 2.0**-11])
def test_rounding_agrees_with_torch(values: list[float]) -> None:
    floats = np.array(values, np.float32).reshape(1, 1, 1, 1, 1, -1)
    for dtype, name in ((torch.bfloat16, "bfloat16"), (torch.float16, "float16")):
        wanted = torch.from_numpy(floats).to(dtype)
        source = KVItems(items=floats, scales=None)
        if (wanted.isinf() & torch.from_numpy(np.isfinite(floats))).any():
            with pytest.raises(TransferFailed, match=f"too large for {name}, the largest is"):
                convert_items(source, "float32", name)
            continue
        got = torch.from_numpy(convert_items(source, "float32", name).items.copy()).view(dtype)
        assert torch.equal(got.isnan(), wanted.isnan())
        assert got[~wanted.isnan()].view(torch.int16).tolist() == wanted[~wanted.isnan()].view(torch.int16).tolist()


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_row_that_is_not_finite_stays_so_in_int8(bad: float) -> None:
    floats = np.ones((1, 1, 1, 2, 1, 6), np.float32)
    floats[0, 0, 0, 0, 0, 3] = bad
    back = convert_items(convert_items(KVItems(items=floats, scales=None), "float32", "int8"), "int8", "float32").items
    assert np.isnan(back[0, 0, 0, 0]).all()
    assert np.array_equal(back[0, 0, 0, 1], floats[0, 0, 0, 1])


def test_rows_too_small_for_a_scale_are_zero_in_int8() -> None:
    tiny = KVItems(items=np.full((1, 1, 1, 2, 1, 6), 1e-40, np.float32), scales=None)
    quantised = convert_items(tiny, "float32", "int8")
    assert quantised.scales is not None
    assert not quantised.items.any()
    assert not quantised.scales.any()


def test_what_lies_behind_the_tokens_does_not_count() -> None:
    """Slots that no token has filled may hold a stale number that the target's dtype cannot."""
    floats = np.full((1, *layout().block_shape), 3e38, np.float32)
    floats[:, :, :, :, :20] = 1.5
    blocks = pack(KVItems(items=floats, scales=None), layout())
    made = unpack(convert(blocks, layout(), layout(dtype="float16"), tokens=range(20)), layout(dtype="float16")).items
    assert (made[..., :20, :] == 1.5).all()
    assert not made[..., 20:, :].any()
    with pytest.raises(TransferFailed, match="576 keys and values are too large for float16, the largest is 3e"):
        convert(blocks, layout(), layout(dtype="float16"))


@settings(max_examples=30)
@given(st.sampled_from(KINDS), st.sampled_from([1, 2, 3, 6, 12]), st.sampled_from([1, 2, 3, 6, 12]))
def test_heads_of_other_ranks_are_put_together(kind: tuple[str, str], source_size: int, size: int) -> None:
    """What each rank of either split would hold of the same whole blocks."""
    num_kv_heads = 6
    whole = layout(*kind, num_kv_heads=num_kv_heads)
    items = unpack(draw_blocks(whole, 2, np.random.default_rng(source_size * size)), whole)

    def share(rank: int, of: int) -> tuple[KVLayout, KVItems]:
        own = heads_of(rank, of, num_kv_heads)
        part = slice(own.start, own.stop)
        scales = None if items.scales is None else items.scales[:, :, part]
        return replace(whole, num_kv_heads=len(own)), KVItems(items=items.items[:, :, part], scales=scales)

    wanted = [pack(content, place) for place, content in (share(rank, size) for rank in range(size))]
    got = [unpack(np.zeros_like(blocks), share(rank, size)[0]) for rank, blocks in enumerate(wanted)]
    for piece in map_heads(source_size, size, num_kv_heads):
        place, content = share(piece.source_rank, source_size)
        read = unpack(pack(content, place), place)
        of = slice(piece.source_head, piece.source_head + piece.num_heads)
        to = slice(piece.destination_head, piece.destination_head + piece.num_heads)
        target = got[piece.destination_rank]
        target.items[:, :, to] = read.items[:, :, of]
        if target.scales is not None and read.scales is not None:
            target.scales[:, :, to] = read.scales[:, :, of]
    for rank, blocks in enumerate(wanted):
        assert pack(got[rank], share(rank, size)[0]).tobytes() == blocks.tobytes()


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"layers": (0, 2)}, r"layers is \(0, 1\) in the source and \(0, 2\) in the target"),
        ({"window": 128}, "window is None in the source and 128 in the target"),
        ({"num_layers": 3}, "num_layers is 2 in the source and 3 in the target"),
        ({"num_kv_heads": 4}, "num_kv_heads is 2 in the source and 4 in the target"),
        (
            {"head_dim": 8, "num_kv_heads": 1},
            "num_kv_heads is 2 in the source and 1 in the target, head_dim is 6 in the source and 8 in the target",
        ),
    ],
)
def test_other_models_are_refused_by_field(changes: dict[str, Any], named: str) -> None:
    source, target = layout(), replace(layout(), **changes)
    with pytest.raises(HandshakeRefused, match=named):
        convert(np.zeros((1, source.block_bytes), np.uint8), source, target)


@pytest.mark.parametrize(
    ("packing", "dtype"), [(PACKING, "int8"), (CPU_PACKING, "float16"), ("of a later release", "float32")]
)
def test_what_has_no_known_inside_is_refused(packing: str, dtype: str) -> None:
    unknown = layout(packing, dtype)
    for pair in ((unknown, layout()), (layout(), unknown)):
        assert incompatibility(*pair) == f"no conversion is known for dtype {dtype!r} in packing {packing!r}"
    assert incompatibility(layout(), layout(CPU_PACKING, "int8")) is None


@pytest.mark.parametrize("tokens", [range(31, 64), range(32, 97), range(8), range(96, 97)])
def test_tokens_must_be_in_the_blocks(tokens: range) -> None:
    blocks = np.zeros((2, layout().block_bytes), np.uint8)
    with pytest.raises(ValueError, match=r"the blocks hold range\(32, 96\)"):
        convert(blocks, layout(), layout(), tokens=tokens, first_block=1)


@pytest.mark.parametrize("packing", DTYPES)
def test_blocks_must_be_as_large_as_the_source_says(packing: str) -> None:
    short = np.zeros((2, layout(packing).block_bytes - 1), np.uint8)
    with pytest.raises(ValueError, match=f"not uint8 .N, {layout(packing).block_bytes} or more"):
        convert(short, layout(packing), layout())
