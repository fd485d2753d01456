"""How often each token has occurred, kept as arrays that grow by one entry per new token."""

import numpy as np
from numpy.typing import NDArray


class TokenCounts:
    """Distinct token ids and their counts; `add` is O(1), the arrays are views."""

    def __init__(self, token_ids: NDArray[np.integer]) -> None:
        ids, counts = np.unique(token_ids, return_counts=True)
        self._place = {token_id: place for place, token_id in enumerate(ids.tolist())}
        self._ids = np.zeros(max(64, 2 * len(ids)), dtype=np.int64)
        self._counts = np.zeros(len(self._ids), dtype=np.float32)
        self._ids[: len(ids)] = ids
        self._counts[: len(ids)] = counts

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
    def ids(self) -> NDArray[np.int64]:
        """[distinct tokens], in no order; valid until the next `add`."""
        return self._ids[: len(self._place)]

    @property
    def counts(self) -> NDArray[np.float32]:
        """One per id."""
        return self._counts[: len(self._place)]
