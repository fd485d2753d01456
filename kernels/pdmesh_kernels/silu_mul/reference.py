"""The gate of a SwiGLU feed-forward (Shazeer 2020, arXiv 2002.05202)."""

import torch


def silu_mul_reference(gate_up: torch.Tensor) -> torch.Tensor:
    gate, up = gate_up.float().chunk(2, dim=-1)
    return (gate / (1.0 + torch.exp(-gate)) * up).to(gate_up.dtype)
