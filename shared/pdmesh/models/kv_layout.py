"""What the inside of a KV block looks like, and the name under which two engines agree on it."""

import hashlib
import json
from dataclasses import asdict, dataclass

from pdmesh.engine.backend import KVGroupSpec

ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
PACKING = "layer,kv_head,kv,token,head_dim/1"
"""Order of a block's dimensions, and the version of everything that this page does not say."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KVLayout:
    """A block is one contiguous array [num_layers, num_kv_heads, 2 (K, V), block_size, head_dim] of `dtype`."""

    kind: str
    num_layers: int
    num_kv_heads: int
    head_dim: int
    dtype: str
    block_size: int

    @property
    def block_shape(self) -> tuple[int, int, int, int, int]:
        return (self.num_layers, self.num_kv_heads, 2, self.block_size, self.head_dim)

    @property
    def block_bytes(self) -> int:
        return 2 * self.num_layers * self.num_kv_heads * self.block_size * self.head_dim * ITEM_BYTES[self.dtype]

    @property
    def fingerprint(self) -> str:
        content = json.dumps(asdict(self) | {"packing": PACKING}, sort_keys=True)
        return hashlib.sha256(content.encode()).hexdigest()[:32]

    def group(self) -> KVGroupSpec:
        return KVGroupSpec(
            kind=self.kind,
            layers=tuple(range(self.num_layers)),
            block_size=self.block_size,
            block_bytes=self.block_bytes,
            fingerprint=self.fingerprint,
        )
