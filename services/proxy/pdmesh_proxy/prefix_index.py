"""Which engine computed a prompt's beginning lately: a small bounded memory that gives the router prefix affinity.

A prompt is cut into chunks of 64 tokens, each named by a hash over itself and all before it (and the tenant's salt), and
each name leads to the processes that had it last. It is an estimate: engines evict without telling.
"""

import hashlib
from array import array
from collections import OrderedDict

CHUNK_TOKENS = 64
# Hashing stops after 16 Ki tokens: about 0.3 ms, and affinity is decided by then.
MAX_CHUNKS = 256
# More holders of one chunk than this are forgotten, the oldest first.
MAX_HOLDERS = 4
KEY_BYTES = 8


class PrefixIndex:
    """An LRU map from chunk hash to processes."""

    def __init__(self, max_entries: int) -> None:
        self._max_entries = max_entries
        self._holders: OrderedDict[bytes, tuple[str, ...]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._holders)

    def keys(self, token_ids: list[int], cache_salt: str) -> list[bytes]:
        """Name the full chunks of a prompt."""
        if not self._max_entries:
            return []
        parent = hashlib.blake2b(cache_salt.encode(), digest_size=KEY_BYTES).digest()
        keys: list[bytes] = []
        for start in range(0, min(len(token_ids) // CHUNK_TOKENS, MAX_CHUNKS) * CHUNK_TOKENS, CHUNK_TOKENS):
            chunk = array("Q", token_ids[start : start + CHUNK_TOKENS]).tobytes()
            parent = hashlib.blake2b(parent + chunk, digest_size=KEY_BYTES).digest()
            keys.append(parent)
        return keys

    def cached_tokens(self, keys: list[bytes]) -> dict[str, int]:
        """Return for each process how many leading tokens it probably holds."""
        cached: dict[str, int] = {}
        candidates: set[str] | None = None
        for number, key in enumerate(keys, start=1):
            holders = self._holders.get(key)
            if holders is None:
                break
            candidates = set(holders) if candidates is None else candidates.intersection(holders)
            if not candidates:
                break
            cached |= dict.fromkeys(candidates, number * CHUNK_TOKENS)
        return cached

    def record(self, keys: list[bytes], peer_id: str) -> None:
        """Note that a process holds these chunks now."""
        for key in keys:
            others = tuple(holder for holder in self._holders.pop(key, ()) if holder != peer_id)
            self._holders[key] = (peer_id, *others[: MAX_HOLDERS - 1])
        while len(self._holders) > self._max_entries:
            self._holders.popitem(last=False)
