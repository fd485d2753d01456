"""Whether KV of one engine can be used by another, and at what price: as its bytes are, converted, or not at all, and why.

Pure, and asked wherever two engines meet: by the router that pairs them, by either end of a handshake, by `pdmesh up`.
"""

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from enum import IntEnum
from functools import lru_cache

from pdmesh.errors import HandshakeRefused, InvalidRequest
from pdmesh.protocol import mesh_pb2 as pb
from pdmesh.protocol.capabilities import UNTOLD, Capabilities, capabilities_from_pb
from pdmesh.protocol.layout import MAX_LANE_BLOCKS, Layout, incompatibility, most_source_blocks
from pdmesh.protocol.peer_bounds import check_names

FIRST_CONVERSION = 1
"""Version of capability `kv_convert` from which on a consumer converts between all packings and dtypes of `layout.DTYPES`."""


class Exchange(IntEnum):
    """What becomes of blocks on their way, best first."""

    BYTES = 0
    """They are the same at both ends."""
    REPACKED = 1
    """Other blocks, the same numbers: block size or packing differ."""
    ROUNDED = 2
    """Other numbers: the two compute or keep them in different dtypes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KVDescription:
    """What an engine tells of its KV beside the fingerprints; one of protocol version 1 tells nothing."""

    weights_fingerprint: str
    """Of model and weights, whatever the dtype."""
    layouts: tuple[Layout, ...]
    """One per KV group."""
    block_bytes: int
    staging_bytes: int
    """Most bytes of a peer's blocks that it converts at a time; 0: it converts nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KVNames:
    """All by which two engines find out whether they can exchange KV."""

    model_fingerprint: str
    layout_fingerprints: tuple[str, ...]
    description: KVDescription | None = None
    capabilities: Capabilities = UNTOLD


def exchange(source: KVNames, target: KVNames) -> Exchange:
    """Say how blocks get from a pool named `source` into one named `target`. Raises HandshakeRefused, with both ends' values."""
    same_model = source.model_fingerprint == target.model_fingerprint
    same_layout = source.layout_fingerprints == target.layout_fingerprints
    if same_model and same_layout:
        return Exchange.BYTES
    ours, theirs = source.description, target.description
    if not same_model and not have_same_weights(ours, theirs):
        settings = "model and quantization" if ours and theirs else "model, dtype, quantization and kv-cache-dtype"
        raise HandshakeRefused(
            f"their models differ ([{source.model_fingerprint}] and [{target.model_fingerprint}]); "
            f"run both with the same {settings}"
        )
    if not same_layout and (obstacle := _obstacle(source, target)):
        one, other = (", ".join(names.layout_fingerprints) for names in (source, target))
        raise HandshakeRefused(
            f"their KV layouts (block size, dtype, backend) differ ([{one}] and [{other}]) and are not converted: "
            f"{obstacle}; run both with the same backend, dtype and block size"
        )
    return Exchange.REPACKED if same_model else Exchange.ROUNDED


def have_same_weights(one: KVDescription | None, other: KVDescription | None) -> bool:
    """Whether two engines compute the same but for rounding; not known of one that does not say."""
    return one is not None and other is not None and "" != one.weights_fingerprint == other.weights_fingerprint


def description_to_pb(description: KVDescription | None) -> pb.KVDescription | None:
    """Encode."""
    if description is None:
        return None
    layouts = (asdict(layout) for layout in description.layouts)
    return pb.KVDescription(
        weights_fingerprint=description.weights_fingerprint,
        layouts=[pb.KVLayout(**layout) for layout in layouts],
        block_bytes=description.block_bytes,
        staging_bytes=description.staging_bytes,
    )


def names_from_pb(message: pb.EngineInfo | pb.HandshakeRequest | pb.HandshakeReply) -> KVNames:
    """Decode what a message tells of an engine's KV. Raises HandshakeRefused for more than there can be of anything."""
    try:
        check_names(message)
    except InvalidRequest as exc:
        raise HandshakeRefused(f"what it tells of its KV is not sound: {exc.message}") from exc
    return KVNames(
        model_fingerprint=message.model_fingerprint,
        layout_fingerprints=tuple(message.layout_fingerprints),
        description=_description_from_pb(message),
        capabilities=capabilities_from_pb(message.capabilities),
    )


def _description_from_pb(message: pb.EngineInfo | pb.HandshakeRequest | pb.HandshakeReply) -> KVDescription | None:
    if not message.HasField("kv"):
        return None
    return KVDescription(
        weights_fingerprint=message.kv.weights_fingerprint,
        layouts=tuple(_layouts_from_pb(message.kv.layouts)),
        block_bytes=message.kv.block_bytes,
        staging_bytes=message.kv.staging_bytes,
    )


@lru_cache(256)
def _obstacle(source: KVNames, target: KVNames) -> str:
    """Why blocks cannot be converted; empty when they can."""
    ours, theirs = source.description, target.description
    if ours is None or theirs is None:
        return f"the {'source' if ours is None else 'target'} does not tell its layouts"
    if target.capabilities.kv_convert.newest < FIRST_CONVERSION:
        return "the target's release does not convert"
    for what, names, description in (("source", source, ours), ("target", target, theirs)):
        if tuple(layout.fingerprint for layout in description.layouts) != names.layout_fingerprints:
            return f"the {what} describes layouts that are not those of its fingerprints"
    if len(ours.layouts) != len(theirs.layouts):
        return f"the source has {len(ours.layouts)} KV groups, the target {len(theirs.layouts)}"
    for one, other in zip(ours.layouts, theirs.layouts, strict=True):
        if (reason := incompatibility(one, other)) is not None:
            return reason
        if one.block_bytes != ours.block_bytes:
            return f"the source's blocks have {ours.block_bytes} bytes, its layout {one.block_bytes}"
        num_needed = most_source_blocks(one, other)
        if num_needed > MAX_LANE_BLOCKS:
            return (
                f"a block of the target is made of up to {num_needed} of the source's blocks, and it converts at most "
                f"{MAX_LANE_BLOCKS} at a time (block-size)"
            )
        needed = num_needed * one.block_bytes
        if needed > theirs.staging_bytes:
            return (
                f"a block of the target is made of up to {needed} bytes of the source's blocks, and it converts at most "
                f"{theirs.staging_bytes} at a time (kv-staging-bytes)"
            )
    return ""


def _layouts_from_pb(messages: Iterable[pb.KVLayout]) -> Iterable[Layout]:
    for message in messages:
        yield Layout(
            layers=tuple(message.layers),
            window=message.window if message.HasField("window") else None,
            num_layers=message.num_layers,
            num_kv_heads=message.num_kv_heads,
            head_dim=message.head_dim,
            dtype=message.dtype,
            block_size=message.block_size,
            packing=message.packing,
        )
