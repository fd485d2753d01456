"""The names under which other processes know a sequence's full blocks."""

from pdmesh.engine.block_key import extend_chain, first_parent
from pdmesh.engine.request import Sequence


class TierKeys:
    """Names blocks of one group."""

    def __init__(self, root: bytes, block_size: int) -> None:
        self._root = root
        self._block_size = block_size

    def of_prompt(self, sequence: Sequence) -> list[bytes]:
        """Return the keys of the prompt's full blocks; they are hashed once for a request, or came with it."""
        request, size = sequence.request, self._block_size
        num_full = request.num_prompt // size
        if len(request.tier_keys) != num_full:
            request.tier_keys = []
            parent = first_parent(self._root, cache_salt=request.cache_salt)
            extend_chain(request.tier_keys, request.prompt[: num_full * size], size, parent)
        return request.tier_keys

    def of_leading(self, sequence: Sequence, count: int) -> list[bytes]:
        """Return the keys of the first `count` full blocks of prompt and output; the output's are hashed each time."""
        keys = self.of_prompt(sequence)[:count]
        if len(keys) < count:
            parent = keys[-1] if keys else first_parent(self._root, cache_salt=sequence.request.cache_salt)
            start, end = len(keys) * self._block_size, count * self._block_size
            extend_chain(keys, sequence.tokens.view(start, end), self._block_size, parent)
        return keys
