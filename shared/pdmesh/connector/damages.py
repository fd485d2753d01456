"""Connectors over which a peer's KV came otherwise than it had been summed, and over another one whole: the way was at fault.

Such a connector is given up for that peer for a while, as one that fails. Where no other brings it whole either, the owner's
memory is damaged, and no connector is to blame.
"""

import time
from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass

# One may be a bit that has flipped once.
NUM_TO_GIVE_UP = 2
FIRST_PAUSE_S = 5.0
LAST_PAUSE_S = 300.0
# Peers come and go; those that were damaged longest ago are forgotten.
MAX_KNOWN = 1024


@dataclass(slots=True)
class _Damage:
    num_in_a_row: int = 0
    pause_s: float = 0.0
    until_s: float = 0.0
    """When it may be tried again."""


class Damages:
    """What one consumer knows, by peer id and connector."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._known: OrderedDict[tuple[str, str], _Damage] = OrderedDict()

    def __len__(self) -> int:
        return len(self._known)

    def came_whole(self, peer_id: str, connector: str, after: Iterable[str] = ()) -> bool:
        """A transfer's bytes are right over a connector, `after` they were not over others; whether one is given up for that."""
        self._known.pop((peer_id, connector), None)
        given_up = [self._came_damaged(peer_id, each) for each in after]
        return any(given_up)

    def is_given_up(self, peer_id: str, connector: str) -> bool:
        """Whether a connector is not to be used with a peer now."""
        damage = self._known.get((peer_id, connector))
        return damage is not None and self._clock() < damage.until_s

    def _came_damaged(self, peer_id: str, connector: str) -> bool:
        """Count it; whether the connector is given up now."""
        damage = self._known.setdefault((peer_id, connector), _Damage())
        self._known.move_to_end((peer_id, connector))
        if len(self._known) > MAX_KNOWN:
            self._known.popitem(last=False)
        # It stays at the bound: after its pause one more is enough.
        damage.num_in_a_row = min(damage.num_in_a_row + 1, NUM_TO_GIVE_UP)
        if damage.num_in_a_row < NUM_TO_GIVE_UP:
            return False
        if self._clock() >= damage.until_s:
            damage.pause_s = min(2 * damage.pause_s, LAST_PAUSE_S) or FIRST_PAUSE_S
            damage.until_s = self._clock() + damage.pause_s
        return True
