"""kv_write: store the step's new keys and values of one layer in the paged pool."""

import torch

from pdmesh_kernels.checks import require, require_float, require_same_dtype, require_shape
from pdmesh_kernels.kv_write.reference import kv_write_reference

__all__ = ["kv_write", "kv_write_reference"]


def kv_write(
    kv_BHKSD: torch.Tensor,
    key_THD: torch.Tensor,
    value_THD: torch.Tensor,
    block_ids_T: torch.Tensor,
    offsets_T: torch.Tensor,
) -> None:
    """Write in place. Slots must be distinct and within the pool: the caller's block tables say so.

    | argument    | shape                                       | dtype            | stride              |
    |-------------|---------------------------------------------|------------------|---------------------|
    | kv_BHKSD    | [blocks, kv_heads, 2 (K, V), block_size, D] | float32/16, bf16 | last dim contiguous |
    | key_THD     | [T, kv_heads, D]                            | as kv            | last dim contiguous |
    | value_THD   | [T, kv_heads, D]                            | as kv            | last dim contiguous |
    | block_ids_T | [T]                                         | int64            |                     |
    | offsets_T   | [T]                                         | int64            |                     |

    Moves 4·T·kv_heads·D elements.
    """
    require_float("kv_write", "kv", kv_BHKSD, 5)
    require_float("kv_write", "key", key_THD, 3)
    require_float("kv_write", "value", value_THD, 3)
    num_tokens, shape = key_THD.shape[0], kv_BHKSD.shape
    require(shape[2] == 2, "kv_write", f"kv must hold K and V in dimension 2, has {shape[2]}")
    require_shape("kv_write", "key", key_THD, (num_tokens, shape[1], shape[4]))
    require_shape("kv_write", "value", value_THD, (num_tokens, shape[1], shape[4]))
    require_shape("kv_write", "block_ids", block_ids_T, (num_tokens,))
    require_shape("kv_write", "offsets", offsets_T, (num_tokens,))
    require(block_ids_T.dtype == offsets_T.dtype == torch.int64, "kv_write", "block_ids and offsets must be int64")
    require_same_dtype("kv_write", kv=kv_BHKSD, key=key_THD, value=value_THD)
    kv_BHKSD[:, :, 0].transpose(1, 2)[block_ids_T, offsets_T] = key_THD
    kv_BHKSD[:, :, 1].transpose(1, 2)[block_ids_T, offsets_T] = value_THD
