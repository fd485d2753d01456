"""How many bits keys and values have in the pool, as `--kv-cache-dtype` says it."""

from enum import Enum


class KVCacheDtype(Enum):
    """Opt-in where it changes tokens. By how much: docs/quantization.md."""

    AUTO = "auto"
    """The model's dtype."""
    INT8_PER_TOKEN_HEAD = "int8_per_token_head"
    """Each token's key and value of each head in 8 bits, with a scale of their own: in bfloat16, about half the memory."""

    def item_dtype(self, dtype: str) -> str:
        """Return what a layout's `dtype` is for a model that computes in `dtype`."""
        return dtype if self is KVCacheDtype.AUTO else "int8"
