"""Rotary on CPU: four fused multiply-adds into one result."""

import torch


def rotary_torch(x_THD: torch.Tensor, cos_TF: torch.Tensor, sin_TF: torch.Tensor) -> torch.Tensor:
    half = x_THD.shape[-1] // 2
    low_THF, high_THF = x_THD[..., :half], x_THD[..., half:]
    cos_T1F, sin_T1F = cos_TF.unsqueeze(1), sin_TF.unsqueeze(1)
    out_THD = torch.empty(x_THD.shape, dtype=x_THD.dtype, device=x_THD.device)
    torch.mul(low_THF, cos_T1F, out=out_THD[..., :half]).addcmul_(high_THF, sin_T1F, value=-1)
    torch.mul(high_THF, cos_T1F, out=out_THD[..., half:]).addcmul_(low_THF, sin_T1F)
    return out_THD
