"""paged_attention: causal attention of a step's tokens over keys and values that lie in blocks of the pool."""

import torch

from pdmesh_kernels.checks import require, require_float, require_same_dtype, require_shape
from pdmesh_kernels.paged_attention.plan import MAX_GROUP_KEYS, AttentionPlan, plan_attention
from pdmesh_kernels.paged_attention.reference import paged_attention_reference
from pdmesh_kernels.paged_attention.rows import AttentionRows
from pdmesh_kernels.paged_attention.torch_cpu import paged_attention_torch

__all__ = [
    "MAX_GROUP_KEYS",
    "AttentionPlan",
    "AttentionRows",
    "paged_attention",
    "paged_attention_reference",
    "plan_attention",
]


def paged_attention(
    q_THD: torch.Tensor, kv_BJKSD: torch.Tensor, plan: AttentionPlan, scale: float, soft_cap: float | None = None
) -> torch.Tensor:
    """Return the attention output, a new tensor. Rows mix freely: decode (one query), chunks of prompts, any context.

    | argument | shape                                       | dtype            | stride              |
    |----------|---------------------------------------------|------------------|---------------------|
    | q_THD    | [T, heads, D], heads = G · kv_heads         | float32/16, bf16 | contiguous          |
    | kv_BJKSD | [blocks, kv_heads, 2 (K, V), block_size, D] | as q             | last dim contiguous |
    | plan     | of the step, with the same T and block_size | scores as q      |                     |
    | result   | [T, heads, D]                               | as q             | contiguous          |

    Scores are products times `scale`; with a soft cap c they become c · tanh(score / c) (Gemma 2, arXiv 2408.00118).
    The step's own keys must be in the pool already. Slots of a row's blocks behind its last token, and before its window
    inside the window's first block, are read under a mask: they must be finite. No other block is read. Softmax accumulates
    in float32. Moves 2·L·kv_heads·D elements per row of L seen tokens, twice.
    """
    require_float("paged_attention", "q", q_THD, 3)
    require_float("paged_attention", "kv", kv_BJKSD, 5)
    require_same_dtype("paged_attention", q=q_THD, kv=kv_BJKSD)
    num_heads, head_dim = q_THD.shape[1:]
    shape = kv_BJKSD.shape
    require(num_heads % shape[1] == 0, "paged_attention", f"{num_heads} heads are no multiple of {shape[1]} KV heads")
    require_shape("paged_attention", "kv", kv_BJKSD, (shape[0], shape[1], 2, plan.rows.block_size, head_dim))
    require_shape("paged_attention", "q", q_THD, (plan.rows.num_tokens, num_heads, head_dim))
    require(q_THD.is_contiguous(), "paged_attention", "q must be contiguous")
    require(soft_cap is None or soft_cap > 0, "paged_attention", f"soft_cap must be more than 0, is {soft_cap}")
    if q_THD.device.type == "cpu":
        return paged_attention_torch(q_THD, kv_BJKSD, plan, scale, soft_cap)
    return paged_attention_reference(q_THD, kv_BJKSD, plan.rows, scale, soft_cap)
