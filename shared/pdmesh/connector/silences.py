"""Addresses at which nobody answered a handshake, and who may ask there again.

Not everybody: a breaker refuses callers at once, so that a frozen owner costs one of them its timeout now and then, and all
others nothing. Whoever holds a ticket of another start of that owner asks all the same: it was alive when it made that.
"""

from pdmesh.breaker import Breaker
from pdmesh.errors import PeerUnavailable

# Addresses that did not answer and are remembered; what falls out is asked once more.
MAX_BREAKERS = 256


class Silence(Breaker):
    """Nobody answered at an address."""

    owner = ""
    """Peer id of the start that was meant, where one was."""


class Silences:
    """By address; those that answer are not in here."""

    def __init__(self) -> None:
        self._at: dict[str, Silence] = {}

    def __len__(self) -> int:
        return len(self._at)

    def __getitem__(self, address: str) -> Silence:
        return self._at[address]

    def admit(self, address: str, owner: str) -> None:
        """Let a caller ask. Raises PeerUnavailable when the next handshake is not due yet, or is under way."""
        silence = self._at.get(address)
        if silence is None:
            return
        if owner and owner != silence.owner:
            del self._at[address]
        elif not silence.admit():
            raise PeerUnavailable(f"{address} does not answer; it is asked again in {silence.wait_s:.1f} s")

    def failed(self, address: str, owner: str) -> None:
        """Nobody answered; `owner` was meant."""
        silence = self._at.setdefault(address, Silence())
        silence.owner = owner or silence.owner
        silence.failed()
        if len(self._at) > MAX_BREAKERS:
            del self._at[next(iter(self._at))]

    def answered(self, address: str) -> None:
        """Somebody did, whatever the answer was."""
        self._at.pop(address, None)
