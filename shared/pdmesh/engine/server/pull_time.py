"""How long a pull may take: by what is to be copied, so that computing starts in time where an owner stands still.

A pull has no other sign of a frozen owner than that nothing comes; a fixed bound would be too long for a short prompt, whose
computing takes less, and too short for a long one over a slow link.
"""

from pdmesh.connector.options import connector_options

# 400 Mbit/s: what is slower is better replaced by computing.
SLOW_LINK_BYTES_S = 50e6
# A stall of either end that the mesh's heartbeats forgive (`heartbeat_timeout_s`) must not cost a pull: under the `fail` policy a
# decode that had stood still for 5 s failed requests whose bytes were a millisecond away.
START_S = 6.0
# A third of what one core converts of int8, the slowest: docs/architecture.md.
SLOW_CONVERSION_BYTES_S = 25e6
MOST_S = 30.0
"""A pull of a whole context takes seconds at most, counted from when it starts: before, it may be queued for minutes."""


class PullTimes:
    """The rule of one engine, by its `--connector-options`."""

    def __init__(self, options: str) -> None:
        self._rates = {
            name: min(SLOW_LINK_BYTES_S, each.throttle_bytes_s)
            for name, each in connector_options(options).items()
            if each.throttle_bytes_s
        }

    def bound_s(self, connector: str, num_bytes: int, *, is_converted: bool = False) -> float:
        """Seconds for a pull over `connector`, given all bytes that are under way over it, the pull's own included."""
        copy_s = num_bytes / self._rates.get(connector, SLOW_LINK_BYTES_S)
        return min(MOST_S, START_S + copy_s + (num_bytes / SLOW_CONVERSION_BYTES_S if is_converted else 0.0))
