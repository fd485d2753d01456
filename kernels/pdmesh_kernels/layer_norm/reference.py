"""Layer normalisation, as Ba, Kiros & Hinton 2016 define it (arXiv 1607.06450)."""

import torch


def layer_norm_reference(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, epsilon: float
) -> torch.Tensor:
    wide = x.float()
    centred = wide - wide.mean(dim=-1, keepdim=True)
    normal = centred / torch.sqrt(centred.square().mean(dim=-1, keepdim=True) + epsilon)
    scaled = normal * weight.float()
    return (scaled if bias is None else scaled + bias.float()).to(x.dtype)
