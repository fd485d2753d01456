"""The thinking budget: when a thinking section has used it up, the end of the section is forced, token by token.

Semantics are vLLM's. A section opens at `start_token_ids`, in the output or in the prompt (where the last start counts, and
only if no end follows it), and closes at `end_token_ids`, natural or forced; a start inside an open section is nothing new.
Tokens behind the start count, those of the prompt too. When `budget` of them are there, the whole of `end_token_ids` is
forced, after which the choice goes on freely; a later start opens a section with a fresh budget. A start or end that lies
half in the prompt and half in the output is not seen.
"""

import numpy as np
from numpy.typing import NDArray

from pdmesh.protocol.messages import ThinkingBudget


class ThinkingState:
    """Where one choice stands; a pure function of its tokens, so replaying them rebuilds it."""

    def __init__(self, thinking: ThinkingBudget, prompt: NDArray[np.integer], output: NDArray[np.integer]) -> None:
        self._start, self._end = thinking.start_token_ids, thinking.end_token_ids
        self._budget = thinking.budget
        self._num_inside: int | None = None
        """Tokens of the open section; None outside of one."""
        self._num_forced = 0
        """Tokens of the end that were forced so far."""
        self._recent: list[int] = []
        """The output's last tokens, none from before the latest start or end."""
        last_start = _find_last(prompt, self._start)
        if last_start > _find_last(prompt, self._end):
            self._num_inside = len(prompt) - last_start - len(self._start)
        for token_id in output.tolist():
            self.observe(token_id)

    @property
    def forced(self) -> int | None:
        """The token that must come next, if it is not free."""
        if self._num_inside is None or self._num_inside < self._budget or not self._end:
            return None
        return self._end[self._num_forced]

    def observe(self, token_id: int) -> None:
        """Take in the next output token."""
        forced = self.forced
        if forced is not None:
            # A resumed choice may bring tokens that were not forced: then the end is still to come, all of it.
            self._num_forced = self._num_forced + 1 if token_id == forced else 0
            if self._num_forced == len(self._end):
                self._move(None)
            if self._num_forced > 0 or self._num_inside is None:
                return
        self._look_at(token_id)

    def _look_at(self, token_id: int) -> None:
        self._recent = [*self._recent, token_id][-max(len(self._start), len(self._end), 1) :]
        if self._num_inside is None:
            if self._start and self._recent[-len(self._start) :] == self._start:
                self._move(0)
        elif self._end and self._recent[-len(self._end) :] == self._end:
            self._move(None)
        else:
            self._num_inside += 1

    def _move(self, num_inside: int | None) -> None:
        self._num_inside, self._num_forced, self._recent = num_inside, 0, []


def _find_last(tokens: NDArray[np.integer], pattern: list[int]) -> int:
    """Return where `pattern` begins last, -1 if it does not occur."""
    length = len(pattern)
    if length == 0 or length > len(tokens):
        return -1
    places = np.flatnonzero(tokens[: len(tokens) - length + 1] == pattern[0])
    for offset in range(1, length):
        places = places[tokens[places + offset] == pattern[offset]]
    return int(places[-1]) if len(places) else -1
