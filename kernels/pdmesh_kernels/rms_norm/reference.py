"""Root-mean-square normalisation, as Zhang & Sennrich 2019 define it (arXiv 1910.07467)."""

import torch


def rms_norm_reference(x: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
    wide = x.float()
    normal = wide * (1.0 / torch.sqrt(wide.square().mean(dim=-1, keepdim=True) + epsilon))
    if weight.dtype == x.dtype:
        return normal.to(x.dtype) * weight
    return (normal * weight).to(x.dtype)
