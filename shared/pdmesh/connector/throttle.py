"""A limit on the bytes per second of all pulls of a connector: each piece is booked, and moves when its time has come."""

import threading
import time

PIECE_S = 0.05
"""A piece takes about that long at the limit: short enough to be fair, long enough not to matter."""


class Throttle:
    """Spaces pieces out; `bytes_s` 0 lets all pass at once. Thread-safe."""

    def __init__(self, bytes_s: int) -> None:
        self._bytes_s = bytes_s
        self._lock = threading.Lock()
        self._free_s = 0.0
        """When everything that was booked has passed."""

    def piece_blocks(self, block_bytes: int, most_bytes: int) -> int:
        """Blocks to move at once where otherwise `most_bytes` would be; at least one."""
        if self._bytes_s:
            most_bytes = min(most_bytes, int(self._bytes_s * PIECE_S))
        return max(1, most_bytes // block_bytes)

    def book(self, num_bytes: int) -> float:
        """Take a turn for one piece; returns the monotonic time at which it may move, 0 for at once."""
        if not self._bytes_s:
            return 0.0
        with self._lock:
            self._free_s = max(self._free_s, time.monotonic()) + num_bytes / self._bytes_s
            return self._free_s
