"""The gate of a GeGLU feed-forward (Shazeer 2020, arXiv 2002.05202), by the tanh form of GELU (arXiv 1606.08415)."""

import math

import torch


def gelu_mul_reference(gate_up: torch.Tensor) -> torch.Tensor:
    gate, up = gate_up.float().chunk(2, dim=-1)
    inner = math.sqrt(2 / math.pi) * (gate + 0.044715 * gate**3)
    return (0.5 * gate * (1.0 + torch.tanh(inner)) * up).to(gate_up.dtype)
