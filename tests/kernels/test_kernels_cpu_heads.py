"""The CPU library's way from projected rows to queries and to the pool: norms, rotary embedding, layout, blocks begun."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from pdmesh_kernels.cpu.abi import Isa
from pdmesh_kernels.cpu.kv_layout import ITEM_DTYPES, KVItems
from pdmesh_kernels.cpu.library import Library
from support.cpu_attention import LAYER, Step, make_layout, make_step, quantized, run_heads, stored_items

ITEM_TYPES = tuple(ITEM_DTYPES)
SEQUENCES = ((1, 0), (70, 0), (1, 32), (1, 40), (9, 30), (1, 63))


def empty_step(item_type: str, head_dim: int = 64, block_size: int = 32, group_size: int = 3) -> Step:
    """Return a step whose pool is NaN but for blocks that were begun before it: zero where no token is yet."""
    step = make_step(SEQUENCES, make_layout(item_type, head_dim, block_size), group_size=group_size)
    step.pool[:] = 0xFF
    for index, (_, context) in enumerate(SEQUENCES):
        if context % block_size:
            step.pool[step.tables[index, context // block_size]] = 0
    return step


def make_qkv(step: Step, dtype: torch.dtype) -> torch.Tensor:
    """[T, (H + 2 J) D] in rows that end there."""
    width = (step.num_heads + 2 * step.layout.num_kv_heads) * step.layout.head_dim
    return (torch.randn(step.num_tokens, width) * 3).to(dtype)


def make_angles(step: Step, rotary_dim: int) -> torch.Tensor:
    """[T, rotary_dim] cosines, then sines."""
    frequencies = 10000.0 ** -(torch.arange(rotary_dim // 2) / max(rotary_dim // 2, 1))
    angles = torch.from_numpy(step.arrays["positions"]).float()[:, None] * frequencies
    return torch.cat([angles.cos(), angles.sin()], dim=1).contiguous()


def turned(x_THD: torch.Tensor, angles: torch.Tensor, is_interleaved: bool) -> torch.Tensor:
    half = angles.shape[1] // 2
    turn = torch.complex(angles[:, :half], angles[:, half:])[:, None]
    result = x_THD.clone()
    first, second = (
        (slice(0, 2 * half, 2), slice(1, 2 * half, 2)) if is_interleaved else (slice(half), slice(half, 2 * half))
    )
    plane = torch.complex(x_THD[..., first], x_THD[..., second]) * turn
    result[..., first], result[..., second] = plane.real, plane.imag
    return result


def wanted(
    step: Step,
    qkv: torch.Tensor,
    angles: torch.Tensor,
    is_interleaved: bool,
    gains: tuple[torch.Tensor, torch.Tensor] | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return queries, keys and values [T, heads, D]."""
    num_kv_heads = step.layout.num_kv_heads
    heads = qkv.float().reshape(step.num_tokens, -1, step.layout.head_dim)
    query, key, value = heads.split([step.num_heads, num_kv_heads, num_kv_heads], dim=1)
    if gains:
        query, key = (
            x * torch.rsqrt(x.square().mean(dim=-1, keepdim=True) + 1e-5) * gain
            for x, gain in zip((query, key), gains, strict=True)
        )
    return turned(query, angles, is_interleaved), turned(key, angles, is_interleaved), value


def places(step: Step) -> tuple[torch.Tensor, torch.Tensor]:
    """Return block and slot of each token."""
    size = step.layout.block_size
    blocks = [
        step.tables[index, position // size]
        for index, (queries, context) in enumerate(step.sequences)
        for position in range(context, context + queries)
    ]
    return torch.tensor(np.array(blocks), dtype=torch.int64), torch.from_numpy(step.arrays["positions"] % size)


@pytest.mark.parametrize("item_type", ITEM_TYPES)
@pytest.mark.parametrize("qkv_dtype", [torch.float32, torch.bfloat16], ids=["f32", "bf16"])
@pytest.mark.parametrize(
    ("head_dim", "rotary_dim", "is_interleaved", "has_gains"),
    [(64, 64, False, False), (66, 20, False, True), (2, 2, True, True), (80, 80, True, False), (256, 0, False, True)],
)
def test_rows_become_queries_keys_and_values(
    library: Library,
    isa: Isa,
    item_type: str,
    qkv_dtype: torch.dtype,
    head_dim: int,
    rotary_dim: int,
    is_interleaved: bool,
    has_gains: bool,
) -> None:
    step = empty_step(item_type, head_dim, 64 if head_dim == 80 else 32)
    qkv, angles = make_qkv(step, qkv_dtype), make_angles(step, rotary_dim)
    gains = (torch.rand(head_dim) + 0.5, torch.rand(head_dim) + 0.5) if has_gains else None
    found = run_heads(library, isa, step, qkv, angles, gains=gains, is_interleaved=is_interleaved)
    query, key, value = wanted(step, qkv, angles, is_interleaved, gains)
    tolerance = 1e-5 if item_type == "float32" else 2**-8
    torch.testing.assert_close(found[..., :head_dim].float(), query, rtol=tolerance, atol=1e-4)
    assert not found[..., head_dim:].any()
    blocks, slots = places(step)
    stored = stored_items(step.layout, step.pool)[blocks, :, :, slots].float()
    for written, x in ((stored[:, :, 0], key), (stored[:, :, 1], value)):
        if item_type == "int8":
            _, scales = quantized(x)
            assert ((written - x).abs() <= scales[..., None] * 0.51).all()
        else:
            torch.testing.assert_close(written, x, rtol=tolerance, atol=1e-4)


@pytest.mark.parametrize("item_type", ITEM_TYPES)
def test_slots_without_a_token_are_zero_and_nothing_else_is_touched(library: Library, isa: Isa, item_type: str) -> None:
    step = empty_step(item_type)
    before = step.pool.copy()
    run_heads(library, isa, step, make_qkv(step, torch.float32), make_angles(step, 64))
    layout = step.layout
    stored = stored_items(layout, step.pool)
    used = set()
    for index, (queries, context) in enumerate(SEQUENCES):
        for column in range(context // layout.block_size, -(-(queries + context) // layout.block_size)):
            block = int(step.tables[index, column])
            used.add(block)
            end = min(queries + context - column * layout.block_size, layout.block_size)
            assert not stored[block, :, :, end:].any()
            assert stored[block, :, :, max(context - column * layout.block_size, 0) : end].isfinite().all()
    others = [block for block in range(len(step.pool)) if block not in used]
    np.testing.assert_array_equal(step.pool[others], before[others])
    # The layer before, and what the pool gives a block more than it needs.
    begin, end = LAYER * layout.layer_bytes, (LAYER + 1) * layout.layer_bytes
    np.testing.assert_array_equal(step.pool[:, :begin], before[:, :begin])
    np.testing.assert_array_equal(step.pool[:, end:], before[:, end:])


@pytest.mark.parametrize("item_type", ITEM_TYPES)
def test_any_chunks_and_threads_write_the_same_bytes(library: Library, isa: Isa, item_type: str) -> None:
    step = empty_step(item_type)
    qkv, angles = make_qkv(step, torch.bfloat16), make_angles(step, 64)
    queries = run_heads(library, isa, step, qkv, angles)
    for num_threads in (1, 3):
        other = replace(step, pool=empty_step(item_type).pool)
        begin = 0
        for index, (length, context) in enumerate(SEQUENCES):
            for first in range(0, length, 13):
                last = min(first + 13, length)
                part = replace(
                    other, sequences=((last - first, context + first),), tables=step.tables[index : index + 1]
                )
                rows = slice(begin + first, begin + last)
                found = run_heads(library, isa, part, qkv[rows], angles[rows], num_threads=num_threads)
                assert torch.equal(found, queries[rows])
            begin += length
        np.testing.assert_array_equal(other.pool, step.pool)


def test_int8_rows_without_a_scale_stay_in_range(library: Library, isa: Isa) -> None:
    step = empty_step("int8")
    qkv, angles = make_qkv(step, torch.float32), make_angles(step, 0)
    qkv[0] = 0.0
    qkv[1] = 1e-42
    qkv[2, ::3] = torch.inf
    qkv[3, ::5] = torch.nan
    run_heads(library, isa, step, qkv, angles)
    unpacked = step.layout.unpack(step.pool)
    blocks, slots = places(step)
    codes = torch.from_numpy(unpacked.items[:, LAYER])[blocks, :, :, slots]
    assert unpacked.scales is not None
    scales = torch.from_numpy(unpacked.scales[:, LAYER])[blocks, :, :, slots]
    assert not codes[0].any()
    assert not scales[0].any()
    assert scales[1].isfinite().all()
    assert scales[2].isinf().all()
    assert scales[3].isnan().all()
    assert (codes[4:].abs().amax(dim=-1) == 127).all()


@pytest.mark.parametrize("item_type", ITEM_TYPES)
@pytest.mark.parametrize(("head_dim", "block_size"), [(64, 32), (30, 96), (256, 64)])
def test_blocks_survive_the_shared_layout(item_type: str, head_dim: int, block_size: int) -> None:
    layout = make_layout(item_type, head_dim, block_size)
    random = np.random.default_rng(0)
    dtype = ITEM_DTYPES[layout.item_type]
    shape = (3, layout.num_layers, layout.num_kv_heads, 2, block_size)
    items = random.integers(-100, 100, (*shape, head_dim)).astype(dtype)
    scales = random.standard_normal(shape).astype(np.float32) if item_type == "int8" else None
    blocks = np.full((3, layout.block_bytes + 32), 7, np.uint8)
    layout.pack(KVItems(items=items, scales=scales), blocks)
    assert (blocks[:, layout.block_bytes :] == 7).all()
    again = layout.unpack(blocks)
    np.testing.assert_array_equal(again.items, items)
    if scales is not None:
        np.testing.assert_array_equal(again.scales, scales)


def test_the_size_of_a_head_is_the_librarys(library: Library) -> None:
    for dtype, item_type in enumerate(ITEM_TYPES):
        for head_dim, block_size in ((2, 32), (64, 32), (80, 96), (256, 128)):
            layout = make_layout(item_type, head_dim, block_size)
            assert library.functions.pdm_kv_head_bytes(dtype, block_size, head_dim) == layout.head_bytes


def test_wrong_layouts_are_named() -> None:
    for wrong, message in (
        ({"block_size": 16}, "block_size 16"),
        ({"head_dim": 63}, "head_dim 63"),
        ({"num_kv_heads": 0}, "num_kv"),
    ):
        with pytest.raises(ValueError, match=message):
            make_layout("int8", **wrong)
    layout = make_layout("int8")
    items = np.zeros((1, layout.num_layers, layout.num_kv_heads, 2, 32, 64), np.int8)
    with pytest.raises(ValueError, match="scales must be"):
        layout.pack(KVItems(items=items, scales=None), np.zeros((1, layout.block_bytes), np.uint8))
