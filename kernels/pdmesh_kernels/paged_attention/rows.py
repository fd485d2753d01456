"""What a step's attention is about: which tokens ask, and where the keys of their sequences lie."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionRows:
    """N rows, T query tokens. Row i's queries are [query_start[i], query_start[i+1]), at positions context_len[i] … of its
    sequence; its blocks hold the keys of all positions that they see."""

    query_start: NDArray[np.int64]
    """[N + 1], strictly rising, from 0 to T."""
    context_len: NDArray[np.int64]
    """[N]"""
    block_tables: NDArray[np.int32]
    """[N, W] block ids in order of position. Entries behind a row's last query and before its window are never looked at;
    -1 says that there is no block."""
    block_size: int
    sliding_window: int | None = None
    """A query sees itself and the window - 1 tokens before; None: all before."""

    @property
    def num_tokens(self) -> int:
        return int(self.query_start[-1])
