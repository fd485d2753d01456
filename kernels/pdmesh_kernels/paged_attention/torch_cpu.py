"""Paged attention on CPU: gather a row's blocks with one index_select into [kv_head, token], then torch's fused attention,
or, where scores are capped, which that does not know, the plain one.

Query heads that share a KV head are taken as so many queries of it, so no key is copied or read twice. The legend:
H query heads, J KV heads, G = H / J, D head_dim, R decode rows, L keys, Q queries of a tile.
"""

import functools
from dataclasses import dataclass

import torch
import torch.nn.functional as functional

from pdmesh_kernels.paged_attention.plan import AttentionPlan, DecodeGroup, PrefillRow

# Queries per attention call: keys after a tile are not computed, and the mask stays small. 64 to 256 measured alike.
TILE_QUERIES = 128


@dataclass(frozen=True, slots=True)
class Scoring:
    """How scores are made of products."""

    scale: float
    soft_cap: float | None


def paged_attention_torch(
    q_THD: torch.Tensor, kv_BJKSD: torch.Tensor, plan: AttentionPlan, scale: float, soft_cap: float | None
) -> torch.Tensor:
    score = Scoring(scale, soft_cap)
    out_THD = torch.empty(q_THD.shape, dtype=q_THD.dtype, device=q_THD.device)
    kv_JKBSD = kv_BJKSD.permute(1, 2, 0, 3, 4)
    for group in plan.decode_groups:
        _decode(q_THD, kv_JKBSD, group, score, out_THD)
    for row in plan.prefill_rows:
        _prefill(q_THD, kv_JKBSD, row, plan.rows.sliding_window, score, out_THD)
    return out_THD


def _decode(
    q_THD: torch.Tensor, kv_JKBSD: torch.Tensor, group: DecodeGroup, score: Scoring, out_THD: torch.Tensor
) -> None:
    num_kv_heads, head_dim = kv_JKBSD.shape[0], kv_JKBSD.shape[4]
    num_rows = group.tokens_R.shape[0]
    kv_JKRLD = kv_JKBSD.index_select(2, group.blocks).view(num_kv_heads, 2, num_rows, -1, head_dim)
    q_RJGD = q_THD.index_select(0, group.tokens_R).view(num_rows, num_kv_heads, -1, head_dim)
    key_RJLD, value_RJLD = kv_JKRLD[:, 0].transpose(0, 1), kv_JKRLD[:, 1].transpose(0, 1)
    out_RJGD = _attend(q_RJGD, key_RJLD, value_RJLD, group.mask_R11L, score)
    out_THD.index_copy_(0, group.tokens_R, out_RJGD.reshape(num_rows, -1, head_dim))


def _prefill(
    q_THD: torch.Tensor,
    kv_JKBSD: torch.Tensor,
    row: PrefillRow,
    window: int | None,
    score: Scoring,
    out_THD: torch.Tensor,
) -> None:
    num_kv_heads, head_dim = kv_JKBSD.shape[0], kv_JKBSD.shape[4]
    num_groups = q_THD.shape[1] // num_kv_heads
    kv_JKLD = kv_JKBSD.index_select(2, row.blocks_M).view(num_kv_heads, 2, -1, head_dim)
    key_JGLD = kv_JKLD[:, 0, None].expand(-1, num_groups, -1, -1)
    value_JGLD = kv_JKLD[:, 1, None].expand(-1, num_groups, -1, -1)
    context_len = row.end_key - row.num_queries
    for first in range(0, row.num_queries, TILE_QUERIES):
        end = min(first + TILE_QUERIES, row.num_queries)
        # The tile's keys: from the first that its first query sees to its own last query.
        lowest = row.first_key if window is None else max(row.first_key, context_len + first + 1 - window)
        keys = slice(lowest - row.first_key, context_len + end - row.first_key)
        tile = slice(row.start + first, row.start + end)
        q_JGQD = q_THD[tile].view(end - first, num_kv_heads, num_groups, head_dim).permute(1, 2, 0, 3)
        mask_QL = _causal_mask(end - first, keys.stop - keys.start, window, q_THD.dtype)
        out_JGQD = _attend(q_JGQD, key_JGLD[:, :, keys], value_JGLD[:, :, keys], mask_QL, score)
        out_THD[tile].view(end - first, num_kv_heads, num_groups, head_dim).copy_(out_JGQD.permute(2, 0, 1, 3))


def _attend(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None, score: Scoring
) -> torch.Tensor:
    """Attend within the last two dimensions; the others broadcast as batches."""
    if score.soft_cap is None:
        return functional.scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=score.scale)
    scores = torch.matmul(query, key.transpose(-1, -2)).float()
    scores.mul_(score.scale / score.soft_cap).tanh_().mul_(score.soft_cap)
    if mask is not None:
        scores += mask
    return torch.matmul(scores.softmax(dim=-1).to(value.dtype), value)


def _causal_mask(num_queries: int, num_keys: int, window: int | None, dtype: torch.dtype) -> torch.Tensor:
    """Return 0 or -inf, [queries, keys]: the last query is at the last key's position, and sees no key after itself."""
    # All tiles are aligned at their lower right corner, so each is a corner of one mask, whose width is a power of two.
    width = 1 << max(9, (num_keys - 1).bit_length())
    return _corner_mask(width, window, dtype)[TILE_QUERIES - num_queries :, width - num_keys :]


@functools.lru_cache(maxsize=4)
def _corner_mask(width: int, window: int | None, dtype: torch.dtype) -> torch.Tensor:
    behind = torch.arange(width - TILE_QUERIES, width, dtype=torch.int32)[:, None] - torch.arange(
        width, dtype=torch.int32
    )
    hidden = behind < 0 if window is None else (behind < 0) | (behind >= window)
    return torch.zeros(hidden.shape, dtype=dtype).masked_fill_(hidden, -torch.inf)
