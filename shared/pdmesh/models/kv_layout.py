"""The KV layouts of a model's groups."""

from dataclasses import dataclass

from pdmesh.engine.backend import KVGroupSpec
from pdmesh.models.group_plan import plan_groups
from pdmesh.models.model_config import ModelConfig
from pdmesh.protocol.layout import CPU_PACKING, PACKING, Layout

__all__ = ["CPU_PACKING", "PACKING", "KVLayout", "plan_layouts"]


@dataclass(frozen=True, slots=True, kw_only=True)
class KVLayout(Layout):
    """A block of one group of a loaded model."""

    def spec(self) -> KVGroupSpec:
        return KVGroupSpec(
            kind=self.kind,
            layers=self.layers,
            block_size=self.block_size,
            block_bytes=self.block_bytes,
            window=self.window or 0,
            fingerprint=self.fingerprint,
            item_dtype=self.dtype,
            layout=self,
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
