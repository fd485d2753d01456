"""What a backend's forward gives: logits on the host, and each row's largest where the backend has found it on the way."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True)
class StepLogits:
    """R rows of logits. The sampler may change them in place."""

    logits_RV: NDArray[np.float32]
    best_ids: NDArray[np.int64] | None = None
    """[R] the lowest id of each row's largest logit, -1 where a logit is NaN; None: nobody has looked."""


def on_host(outcome: torch.Tensor | StepLogits) -> StepLogits:
    """Return a forward's result as arrays, which share the memory of what is on the host already."""
    return outcome if isinstance(outcome, StepLogits) else StepLogits(outcome.contiguous().cpu().numpy())
