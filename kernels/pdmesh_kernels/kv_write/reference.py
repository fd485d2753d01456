"""Put each token's key and value into its slot of the pool, one at a time."""

import torch


def kv_write_reference(
    kv_BHKSD: torch.Tensor,
    key_THD: torch.Tensor,
    value_THD: torch.Tensor,
    block_ids_T: torch.Tensor,
    offsets_T: torch.Tensor,
) -> None:
    for token, (block_id, offset) in enumerate(zip(block_ids_T.tolist(), offsets_T.tolist(), strict=True)):
        kv_BHKSD[block_id, :, 0, offset] = key_THD[token]
        kv_BHKSD[block_id, :, 1, offset] = value_THD[token]
