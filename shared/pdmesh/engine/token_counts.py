"""How often each token has occurred, kept as arrays that grow by one entry per new token."""

import numpy as np
import torch


class TokenCounts:
    """Distinct token ids and their counts; `add` is O(1), the tensors are views."""

    def __init__(self) -> None:
        self._place: dict[int, int] = {}
        self._ids = np.zeros(64, dtype=np.int64)
        self._counts = np.zeros(64, dtype=np.float32)

    def add(self, token_id: int) -> None:
        place = self._place.get(token_id)
        if place is None:
            place = self._place[token_id] = len(self._place)
            if place == len(self._ids):
                self._ids = np.concatenate([self._ids, np.zeros_like(self._ids)])
                self._counts = np.concatenate([self._counts, np.zeros_like(self._counts)])
            self._ids[place] = token_id
        self._counts[place] += 1.0

    @property
    def ids(self) -> torch.Tensor:
        """int64 [distinct tokens], on the CPU; valid until the next `add`."""
        return torch.from_numpy(self._ids[: len(self._place)])

    @property
    def counts(self) -> torch.Tensor:
        """float32, one per id."""
        return torch.from_numpy(self._counts[: len(self._place)])
