"""What the inside of a KV block looks like, the name under which two engines agree on it, and which insides can become others.

An engine tells its layouts beside their fingerprints: equal fingerprints exchange bytes, a consumer converts what it can, and
whoever pairs engines knows from this which pairs are left.
"""

import hashlib
import json
import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields
from functools import lru_cache

from pdmesh_kernels.cpu.kv_layout import ItemType, PackedLayout

ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
PACKING = "layer,kv_head,kv,token,head_dim/2"
"""Order of a block's dimensions, and the version of everything that this page does not say."""
CPU_PACKING = "cpu library 1"
"""The CPU library's own order: `PackedLayout`, `pdm_kv` in its interface."""
CPU_ITEM_TYPES: dict[str, ItemType] = {"float32": "float32", "bfloat16": "bfloat16", "int8": "int8"}
DTYPES = {PACKING: ITEM_BYTES.keys(), CPU_PACKING: CPU_ITEM_TYPES.keys()}
"""What each packing can hold."""
# What must be the same because the model is; all else can be converted.
OF_THE_MODEL = ("layers", "window", "num_layers", "num_kv_heads", "head_dim")
# No model comes near: what exceeds it was not told by an engine.
MOST = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """A block of one group: [num_layers, num_kv_heads, 2 (K, V), block_size, head_dim] of `dtype`, in the order of `packing`."""

    layers: tuple[int, ...]
    """The model's layers whose keys and values it holds, in order."""
    window: int | None
    """Of these layers; None: full attention."""
    num_layers: int
    """Layers that it has room for, the same in all groups of a model; what is behind its own is zero."""
    num_kv_heads: int
    head_dim: int
    dtype: str
    """Of the items; "int8" has a scale per token and head beside them, and only CPU_PACKING has it."""
    block_size: int
    packing: str = PACKING

    @property
    def kind(self) -> str:
        return "full" if self.window is None else "sliding"

    @property
    def block_shape(self) -> tuple[int, int, int, int, int]:
        return (self.num_layers, self.num_kv_heads, 2, self.block_size, self.head_dim)

    @property
    def block_bytes(self) -> int:
        """Raises ValueError for what its packing cannot hold."""
        if self.packing == CPU_PACKING:
            return self.cpu_layout().block_bytes
        return 2 * self.num_layers * self.num_kv_heads * self.block_size * self.head_dim * ITEM_BYTES[self.dtype]

    def cpu_layout(self) -> PackedLayout:
        """Return the inside of a block in CPU_PACKING. Raises ValueError for what the CPU library cannot hold."""
        return PackedLayout(
            item_type=CPU_ITEM_TYPES[self.dtype],
            num_layers=self.num_layers,
            num_kv_heads=self.num_kv_heads,
            block_size=self.block_size,
            head_dim=self.head_dim,
        )

    @property
    def fingerprint(self) -> str:
        content = json.dumps(asdict(self) | {"kind": self.kind}, sort_keys=True)
        return hashlib.sha256(content.encode()).hexdigest()[:32]

    def unsound(self) -> str:
        """Say what a peer that told this cannot mean; empty when it can."""
        if self.dtype not in DTYPES.get(self.packing, ()):
            return f"no conversion is known for dtype {self.dtype!r} in packing {self.packing!r}"
        sizes = (self.num_layers, self.num_kv_heads, self.head_dim, self.block_size, self.window or 1, len(self.layers))
        if not all(1 <= size <= MOST for size in sizes):
            return f"no block is laid out as {_told(self)}"
        try:
            _ = self.block_bytes
        except ValueError as exc:
            return f"no block is laid out as {_told(self)}: {exc}"
        return ""


@lru_cache(256)
def incompatibility(source: Layout, target: Layout) -> str | None:
    """Say why blocks of `source` cannot become blocks of `target`, with what either end has; None when they can."""
    for layout in (source, target):
        if what := layout.unsound():
            return what
    differing = [
        f"{name} is {theirs} in the source and {ours} in the target"
        for name in OF_THE_MODEL
        if (theirs := getattr(source, name)) != (ours := getattr(target, name))
    ]
    return f"KV blocks of different models: {', '.join(differing)}" if differing else None


MAX_LANE_BLOCKS = 512
"""Most blocks of a peer that are fetched together to be converted: connectors keep a word beside each that is under way."""


def most_source_blocks(source: Layout, target: Layout) -> int:
    """Return how many blocks of `source` may hold tokens of one block of `target`."""
    # As far inside a block of the source as one of the target can begin.
    offset = source.block_size - math.gcd(source.block_size, target.block_size)
    return (offset + target.block_size - 1) // source.block_size + 1


def differences(one: Layout, other: Layout) -> Iterator[str]:
    """What of two layouts differs, field by field, as people read it."""
    for field in fields(Layout):
        ours, theirs = getattr(one, field.name), getattr(other, field.name)
        if ours != theirs:
            yield f"{field.name} {ours} and {theirs}"


def _told(layout: Layout) -> str:
    return ", ".join(f"{field.name} {getattr(layout, field.name)}" for field in fields(Layout))
