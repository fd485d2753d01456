"""Which slot of an arena holds which block: the tier's book, pure bookkeeping without memory or I/O.

A slot is in exactly one place: free, filling (reserved for a key whose content is on its way), pinned (held, and named by
at least one lookup) or idle (held and evictable, least recently used first). A key is visible to lookups only when held.
Chains are hit from their first block on, so a chain's last blocks are always the first to go.
"""

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Reservation:
    """A slot being filled for a key; ends in `commit` or `abort`."""

    key: bytes
    slot: int


@dataclass(slots=True)
class _Pinned:
    slot: int
    count: int
    is_condemned: bool = False
    """Not visible any more; free when nothing pins it."""


class SlotIndex:
    """Books `num_slots` slots. `on_reuse(slot)` is called before a slot's content may change; `on_evict()` counts."""

    def __init__(self, num_slots: int, *, on_reuse: Callable[[int], None], on_evict: Callable[[], None]) -> None:
        self.num_slots = num_slots
        self._on_reuse = on_reuse
        self._on_evict = on_evict
        self._free = list(range(num_slots - 1, -1, -1))
        self._filling: dict[bytes, int] = {}
        self._pinned: dict[bytes, _Pinned] = {}
        # Least recently used first.
        self._idle: OrderedDict[bytes, int] = OrderedDict()
        self._pins: dict[str, list[bytes]] = {}
        self._watchers: dict[bytes, list[Callable[[], None]]] = {}

    @property
    def num_used(self) -> int:
        """Slots that hold a visible block."""
        return len(self._pinned) + len(self._idle)

    @property
    def num_pinned(self) -> int:
        return len(self._pinned)

    @property
    def num_filling(self) -> int:
        return len(self._filling)

    def slot_of(self, key: bytes) -> int | None:
        """Slot of a held key; None when it is not visible."""
        pinned = self._pinned.get(key)
        if pinned is None:
            return self._idle.get(key)
        return None if pinned.is_condemned else pinned.slot

    def is_known(self, key: bytes) -> bool:
        """Whether the key is held or on its way."""
        return key in self._idle or key in self._pinned or key in self._filling

    def is_filling(self, key: bytes) -> bool:
        """Whether the key's content is on its way."""
        return key in self._filling

    def watch(self, key: bytes, on_settled: Callable[[], None]) -> None:
        """Call `on_settled` once, when a key that is filling has become visible or was given up."""
        assert key in self._filling, "only what is filling settles"
        self._watchers.setdefault(key, []).append(on_settled)

    def pinned_by(self, pin_id: str) -> list[bytes]:
        """What `pin_id` pins and is still visible."""
        return [key for key in self._pins.get(pin_id, ()) if not self._pinned[key].is_condemned]

    def condemn(self, keys: list[bytes]) -> None:
        """Make held keys invisible for good; their slots are free when nothing pins them."""
        for key in keys:
            if (pinned := self._pinned.get(key)) is not None:
                pinned.is_condemned = True
            elif (slot := self._idle.pop(key, None)) is not None:
                self._free.append(slot)

    def has_pin(self, pin_id: str) -> bool:
        """Whether `pin_id` pins anything."""
        return pin_id in self._pins

    def num_leading(self, keys: list[bytes]) -> int:
        """How many of `keys`, from the first on without a gap, are held."""
        for count, key in enumerate(keys):
            if self.slot_of(key) is None:
                return count
        return len(keys)

    def reserve(self, keys: list[bytes]) -> list[Reservation]:
        """Reserve a slot for each key that is not known yet, evicting idle blocks; stops when no slot can be had.

        Blocks of `keys` that are held already count as just used, so they are not evicted for the rest of their chain
        while anything older is left.
        """
        self.touch(keys)
        reserved: list[Reservation] = []
        for key in keys:
            if self.is_known(key):
                continue
            slot = self._take()
            if slot is None:
                break
            self._on_reuse(slot)
            self._filling[key] = slot
            reserved.append(Reservation(key, slot))
        return reserved

    def commit(self, reserved: list[Reservation]) -> None:
        """Make filled slots visible."""
        for reservation in reversed(reserved):
            self._idle[reservation.key] = self._filling.pop(reservation.key)
        self._tell_watchers(reserved)

    def abort(self, reserved: list[Reservation]) -> None:
        """Give back slots whose content did not arrive. Nothing may write to them any more."""
        for reservation in reversed(reserved):
            self._free.append(self._filling.pop(reservation.key))
        self._tell_watchers(reserved)

    def touch(self, keys: list[bytes]) -> None:
        """Count held keys as just used."""
        for key in reversed(keys):
            if key in self._idle:
                self._idle.move_to_end(key)

    def pin(self, pin_id: str, keys: list[bytes]) -> list[int]:
        """Keep held `keys` in place until `unpin(pin_id)` and return their slots; may be called again to add more."""
        slots: list[int] = []
        for key in keys:
            pinned = self._pinned.get(key)
            if pinned is None:
                pinned = self._pinned[key] = _Pinned(self._idle.pop(key), 0)
            pinned.count += 1
            slots.append(pinned.slot)
        if keys:
            self._pins.setdefault(pin_id, []).extend(keys)
        return slots

    def unpin(self, pin_id: str) -> bool:
        """Let go of what `pin_id` pinned; False when it is not known (any more)."""
        keys = self._pins.pop(pin_id, None)
        if keys is None:
            return False
        for key in reversed(keys):
            pinned = self._pinned[key]
            pinned.count -= 1
            if pinned.count == 0:
                del self._pinned[key]
                if pinned.is_condemned:
                    self._free.append(pinned.slot)
                else:
                    self._idle[key] = pinned.slot
        return True

    def check_integrity(self) -> None:
        """Assert that every slot is in exactly one place and that pins add up."""
        places = [*self._free, *self._filling.values(), *self._idle.values()]
        places += [pinned.slot for pinned in self._pinned.values()]
        assert sorted(places) == list(range(self.num_slots)), "a slot is lost or in two places"
        keys = [*self._filling, *self._idle, *self._pinned]
        assert len(keys) == len(set(keys)), "a key is in two places"
        assert self._watchers.keys() <= self._filling.keys(), "somebody waits for what will not settle"
        counts: dict[bytes, int] = {}
        for pin_keys in self._pins.values():
            for key in pin_keys:
                counts[key] = counts.get(key, 0) + 1
        assert counts == {key: pinned.count for key, pinned in self._pinned.items()}, "pins do not add up"

    def _tell_watchers(self, settled: list[Reservation]) -> None:
        for reservation in settled:
            for on_settled in self._watchers.pop(reservation.key, ()):
                on_settled()

    def _take(self) -> int | None:
        if self._free:
            return self._free.pop()
        if not self._idle:
            return None
        _, slot = self._idle.popitem(last=False)
        self._on_evict()
        return slot
