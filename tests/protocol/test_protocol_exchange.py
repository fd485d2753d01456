"""Which engines can use each other's KV: equal ones as it is, unlike ones by conversion, others not, and the reason is said."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from pdmesh.errors import HandshakeRefused
from pdmesh.protocol import mesh_pb2 as pb
from pdmesh.protocol.capabilities import OWN, UNTOLD, capabilities_to_pb
from pdmesh.protocol.exchange import Exchange, KVDescription, KVNames, description_to_pb, exchange, names_from_pb
from pdmesh.protocol.layout import CPU_PACKING, DTYPES, PACKING, Layout, most_source_blocks
from pdmesh.protocol.token_pieces import blocks_of


def layout(packing: str = PACKING, dtype: str = "float32", block_size: int = 32, **changes: object) -> Layout:
    made = Layout(
        layers=(0, 1),
        window=None,
        num_layers=2,
        num_kv_heads=2,
        head_dim=64,
        dtype=dtype,
        block_size=block_size,
        packing=packing,
    )
    return replace(made, **changes)  # type: ignore[arg-type]


def names(*layouts: Layout, model: str = "m", weights: str = "w", staging_bytes: int = 1 << 20) -> KVNames:
    return KVNames(
        model_fingerprint=model,
        layout_fingerprints=tuple(each.fingerprint for each in layouts),
        description=KVDescription(
            weights_fingerprint=weights,
            layouts=layouts,
            block_bytes=0 if layouts[0].unsound() else layouts[0].block_bytes,
            staging_bytes=staging_bytes,
        ),
        capabilities=OWN,
    )


@pytest.mark.parametrize("packing", DTYPES)
@pytest.mark.parametrize("other_packing", DTYPES)
def test_every_pair_of_packings_and_dtypes_of_one_model_is_exchanged(packing: str, other_packing: str) -> None:
    for dtype in DTYPES[packing]:
        for other_dtype in DTYPES[other_packing]:
            source = names(layout(packing, dtype), model=dtype)
            target = names(layout(other_packing, other_dtype), model=other_dtype)
            wanted = Exchange.ROUNDED
            if dtype == other_dtype:
                wanted = Exchange.BYTES if packing == other_packing else Exchange.REPACKED
            assert exchange(source, target) is wanted


def test_another_block_size_keeps_the_numbers() -> None:
    assert exchange(names(layout(block_size=16)), names(layout())) is Exchange.REPACKED
    assert (
        exchange(names(layout(block_size=2)), names(layout(block_size=1024), staging_bytes=1 << 21))
        is Exchange.REPACKED
    )
    sliding = [layout(window=128, block_size=size) for size in (16, 32)]
    assert exchange(names(layout(block_size=16), sliding[0]), names(layout(), sliding[1])) is Exchange.REPACKED


BIG = layout(num_kv_heads=64, head_dim=256)


@pytest.mark.parametrize(
    ("source", "target", "why"),
    [
        (names(layout(), model="a", weights="v"), names(layout(), model="b"), "their models differ ([a] and [b])"),
        (
            names(layout(), model="a", weights=""),
            names(layout(), model="b", weights=""),
            "their models differ ([a] and [b])",
        ),
        (
            replace(names(layout()), description=None),
            names(layout(block_size=16)),
            "the source does not tell its layouts",
        ),
        (
            names(layout()),
            replace(names(layout(block_size=16)), description=None),
            "the target does not tell its layouts",
        ),
        (
            names(layout()),
            replace(names(layout(block_size=16)), capabilities=UNTOLD),
            "the target's release does not convert",
        ),
        (
            replace(names(layout()), layout_fingerprints=("x",)),
            names(layout(block_size=16)),
            "the source describes layouts that are not those of its fingerprints",
        ),
        (names(layout(), layout()), names(layout(block_size=16)), "the source has 2 KV groups, the target 1"),
        (names(layout(window=8)), names(layout(window=9)), "window is 8 in the source and 9 in the target"),
        (names(layout(num_kv_heads=4)), names(layout()), "num_kv_heads is 4 in the source and 2 in the target"),
        (names(layout(dtype="float16")), names(layout("of a later release")), "in packing 'of a later release'"),
        (
            names(BIG),
            names(replace(BIG, block_size=48)),
            f"made of up to {BIG.block_bytes * 2} bytes of the source's blocks, and it converts at most 1048576 at a time",
        ),
        (
            names(layout(block_size=1)),
            names(layout(block_size=1024), staging_bytes=1 << 22),
            "made of up to 1024 of the source's blocks, and it converts at most 512 at a time (block-size)",
        ),
        (names(layout()), names(layout(block_size=16), staging_bytes=0), "it converts at most 0 at a time"),
        (names(layout(CPU_PACKING, block_size=16)), names(layout()), "not a multiple of 32"),
        (names(layout()), names(layout(num_layers=0)), "no block is laid out as layers (0, 1)"),
    ],
)
def test_others_are_refused_with_the_reason(source: KVNames, target: KVNames, why: str) -> None:
    with pytest.raises(HandshakeRefused) as refused:
        exchange(source, target)
    assert why in refused.value.message
    if source.model_fingerprint == target.model_fingerprint:
        for end in (source, target):
            assert ", ".join(end.layout_fingerprints) in refused.value.message


def test_names_survive_the_wire() -> None:
    for told in (names(layout(CPU_PACKING, "int8"), layout(window=64)), replace(names(layout()), description=None)):
        message = pb.HandshakeReply(
            model_fingerprint=told.model_fingerprint,
            layout_fingerprints=told.layout_fingerprints,
            capabilities=capabilities_to_pb(told.capabilities),
            kv=description_to_pb(told.description),
        )
        assert names_from_pb(pb.HandshakeReply.FromString(message.SerializeToString())) == told


@pytest.mark.parametrize("size", [1, 5, 16, 32])
@pytest.mark.parametrize("other", [1, 5, 16, 32])
def test_most_source_blocks_is_what_a_block_can_meet(size: int, other: int) -> None:
    met = [len(blocks_of(range(start * other, (start + 1) * other), size)) for start in range(64)]
    assert most_source_blocks(layout(block_size=size), layout(block_size=other)) == max(met)


@pytest.mark.parametrize("kind", [pb.EngineInfo, pb.HandshakeReply])
def test_an_engine_that_describes_more_layers_than_there_can_be_is_refused_before_they_are_compared(kind: Any) -> None:
    """A message of half a megabyte kept the event loop for two seconds, and its layers in a cache for good."""
    message = kind(kv=pb.KVDescription(layouts=[pb.KVLayout(layers=range(1 << 17))]))
    with pytest.raises(HandshakeRefused, match=r"kv\.layouts\.layers: 131072 given, at most 16384"):
        names_from_pb(message)
