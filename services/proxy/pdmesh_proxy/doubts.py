"""Tokens that a client may have and that an engine drew from damaged KV: other engines draw them again, and nobody goes on behind
a wrong one.
"""

import msgspec

from pdmesh.errors import DamagedKV
from pdmesh.protocol.messages import ChoiceDelta


class Doubts:
    """Of one request. Noise is a function of choice and place, so that a token comes out the same where all is well."""

    def __init__(self) -> None:
        self._num_before: list[int] = []
        """Tokens that each choice had when the prefill leg began whose KV may be in doubt."""
        self._doubted: dict[int, list[int]] = {}
        """By choice: its last tokens, to be drawn again."""

    def prefill_begins(self, emitted: list[list[int]]) -> None:
        """Note what no prefill leg that begins now has drawn."""
        self._num_before = [len(self.sure(choice, tokens)) for choice, tokens in enumerate(emitted)]

    def doubt(self, emitted: list[list[int]], choices: set[int]) -> None:
        """The KV of the last prefill leg was damaged: have all that came since drawn again."""
        if self._num_before:
            self._doubted = {choice: emitted[choice][self._num_before[choice] :] for choice in choices}

    def sure(self, choice: int, emitted: list[int]) -> list[int]:
        """What an engine may go on behind."""
        return emitted[: len(emitted) - len(self._doubted.get(choice, ()))]

    def confirm(self, delta: ChoiceDelta) -> ChoiceDelta:
        """Return what is new in a delta. Raises DamagedKV when it is not what the client has."""
        doubted = self._doubted.get(delta.choice)
        if not doubted:
            return delta
        again, wanted = delta.token_ids[: len(doubted)], doubted[: len(delta.token_ids)]
        if again != wanted or (delta.finish_reason and len(again) < len(doubted)):
            raise DamagedKV(
                f"tokens that were given out ({wanted}) were drawn from damaged KV: drawn anew they are {again}"
            )
        del doubted[: len(again)]
        return msgspec.structs.replace(
            delta, token_ids=delta.token_ids[len(again) :], logprobs=delta.logprobs[len(again) :]
        )
