"""Rotary position embedding (Su et al. 2021, arXiv 2104.09864) in the rotate-half order of Llama checkpoints."""

import torch


def rotary_reference(x_THD: torch.Tensor, cos_TF: torch.Tensor, sin_TF: torch.Tensor) -> torch.Tensor:
    # Dimensions i and i + D/2 are one complex number, turned by the token's angle for frequency i.
    half = x_THD.shape[-1] // 2
    plane = torch.complex(x_THD[..., :half].float(), x_THD[..., half:].float())
    turned = plane * torch.complex(cos_TF.float(), sin_TF.float())[:, None, :]
    return torch.cat((turned.real, turned.imag), dim=-1).to(x_THD.dtype)
