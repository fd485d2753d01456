"""What the inside of a KV block looks like, and the name under which two engines agree on it."""

import hashlib
import json
from dataclasses import asdict, dataclass

from pdmesh.engine.backend import KVGroupSpec
from pdmesh.models.group_plan import plan_groups
from pdmesh.models.model_config import ModelConfig
from pdmesh_kernels.cpu.kv_layout import ItemType, PackedLayout

ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
PACKING = "layer,kv_head,kv,token,head_dim/2"
"""Order of a block's dimensions, and the version of everything that this page does not say."""
CPU_PACKING = "cpu library 1"
"""The CPU library's own order: `PackedLayout`, `pdm_kv` in its interface."""
CPU_ITEM_TYPES: dict[str, ItemType] = {"float32": "float32", "bfloat16": "bfloat16", "int8": "int8"}


@dataclass(frozen=True, slots=True, kw_only=True)
class KVLayout:
    """A block of one group: a contiguous array [num_layers, num_kv_heads, 2 (K, V), block_size, head_dim] of `dtype`."""

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

    def spec(self) -> KVGroupSpec:
        return KVGroupSpec(
            kind=self.kind,
            layers=self.layers,
            block_size=self.block_size,
            block_bytes=self.block_bytes,
            window=self.window or 0,
            fingerprint=self.fingerprint,
            item_dtype=self.dtype,
        )


def plan_layouts(config: ModelConfig, dtype: str, block_size: int, packing: str = PACKING) -> tuple[KVLayout, ...]:
    """Part a model's layers into KV groups; one layout each, all of the same size. `dtype` is that of the items."""
    groups = plan_groups(config.windows)
    return tuple(
        KVLayout(
            layers=group.layers,
            window=group.window,
            num_layers=max(len(each.layers) for each in groups),
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            dtype=dtype,
            block_size=block_size,
            packing=packing,
        )
        for group in groups
    )
