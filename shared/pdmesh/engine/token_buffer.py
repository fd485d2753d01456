"""The token ids of one sequence: appended one by one, read as slices without copying."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray


class TokenBuffer:
    """A growing int64 array; `len` and `append` are O(1), a view copies nothing."""

    def __init__(self, token_ids: Sequence[int] | NDArray[np.int64]) -> None:
        self._array = np.array(token_ids, dtype=np.int64)
        self._length = len(self._array)

    def __len__(self) -> int:
        return self._length

    def append(self, token_id: int) -> None:
        if self._length == len(self._array):
            self._array = np.concatenate([self._array, np.zeros(max(64, self._length // 2), dtype=np.int64)])
        self._array[self._length] = token_id
        self._length += 1

    def view(self, start: int, end: int) -> NDArray[np.int64]:
        """Return tokens [start, end); valid until the next append."""
        return self._array[start : min(end, self._length)]
