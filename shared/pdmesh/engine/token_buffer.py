"""The token ids of one sequence: a prompt that all choices of a request share, and a tail of its own that grows."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

MIN_GROWTH_TOKENS = 64


class TokenBuffer:
    """Int64 ids; `len` and `append` are O(1). `prompt` is shared and never changed, `tail` is copied."""

    def __init__(self, prompt: NDArray[np.int64], tail: Sequence[int] = ()) -> None:
        self._prompt = prompt
        self._tail = np.array(tail, dtype=np.int64)
        self._length = len(prompt) + len(tail)

    def __len__(self) -> int:
        return self._length

    def append(self, token_id: int) -> None:
        place = self._length - len(self._prompt)
        if place == len(self._tail):
            self._tail = np.concatenate([self._tail, np.zeros(max(MIN_GROWTH_TOKENS, place // 2), dtype=np.int64)])
        self._tail[place] = token_id
        self._length += 1

    def truncate(self, length: int) -> None:
        """Keep the first `length` tokens, all of the prompt among them."""
        self._length = max(length, len(self._prompt))

    def view(self, start: int, end: int) -> NDArray[np.int64]:
        """Return tokens [start, end), valid until the next append; copied only where prompt and tail meet."""
        border, end = len(self._prompt), min(end, self._length)
        if end <= border:
            return self._prompt[start:end]
        if start >= border:
            return self._tail[start - border : end - border]
        return np.concatenate([self._prompt[start:], self._tail[: end - border]])
