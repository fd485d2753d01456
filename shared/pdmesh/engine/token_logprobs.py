"""Log-probabilities as clients see them: of the model itself, before penalties and temperature."""

import torch

from pdmesh.protocol.messages import TokenLogprobs


def raw_logprobs(logits_RV: torch.Tensor) -> torch.Tensor:
    """Return the log-softmax of each row; a new tensor, so that later edits of the logits do not reach it."""
    return torch.log_softmax(logits_RV, dim=-1, dtype=torch.float32)


def report_logprobs(logprobs_RV: torch.Tensor, token_ids: list[int], num_top: int) -> list[TokenLogprobs]:
    """Describe the chosen token of each row and the `num_top` most likely ones, which may include it."""
    chosen = torch.tensor(token_ids, dtype=torch.int64, device=logprobs_RV.device).unsqueeze(-1)
    chosen_logprobs = logprobs_RV.gather(-1, chosen)
    ranks = (logprobs_RV >= chosen_logprobs).sum(dim=-1).tolist()
    top = logprobs_RV.topk(min(num_top, logprobs_RV.shape[-1]), dim=-1)
    ids = torch.cat([chosen, top.indices], dim=-1).tolist()
    values = torch.cat([chosen_logprobs, top.values], dim=-1).tolist()
    return [
        TokenLogprobs(token_ids=row_ids, logprobs=row_values, rank=rank)
        for row_ids, row_values, rank in zip(ids, values, ranks, strict=True)
    ]
