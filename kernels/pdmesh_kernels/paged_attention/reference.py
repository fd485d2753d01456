"""Causal attention of each query token over its own sequence, the keys fetched token by token from the pool."""

import torch

from pdmesh_kernels.paged_attention.rows import AttentionRows


def paged_attention_reference(
    q_THD: torch.Tensor,
    kv_BHKSD: torch.Tensor,
    rows: AttentionRows,
    scale: float,
    soft_cap: float | None = None,
) -> torch.Tensor:
    out_THD = torch.empty_like(q_THD)
    num_groups = q_THD.shape[1] // kv_BHKSD.shape[1]
    for row, blocks in enumerate(rows.block_tables.tolist()):
        start, end = int(rows.query_start[row]), int(rows.query_start[row + 1])
        for token in range(start, end):
            position = int(rows.context_len[row]) + token - start
            first = 0 if rows.sliding_window is None else max(0, position + 1 - rows.sliding_window)
            slots = [(blocks[seen // rows.block_size], seen % rows.block_size) for seen in range(first, position + 1)]
            kv_LHKD = torch.stack([kv_BHKSD[block, :, :, offset] for block, offset in slots]).float()
            keys_LHD = kv_LHKD[:, :, 0].repeat_interleave(num_groups, dim=1)
            values_LHD = kv_LHKD[:, :, 1].repeat_interleave(num_groups, dim=1)
            scores_HL = torch.einsum("hd,lhd->hl", q_THD[token].float(), keys_LHD) * scale
            if soft_cap is not None:
                scores_HL = soft_cap * torch.tanh(scores_HL / soft_cap)
            out_THD[token] = torch.einsum("hl,lhd->hd", scores_HL.softmax(dim=-1), values_LHD).to(q_THD.dtype)
    return out_THD
