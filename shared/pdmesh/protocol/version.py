"""Which version of the wire two services speak: each states a range, the highest common version is used.

Ranges, never equality: during a rolling upgrade old and new services work together as long as their ranges meet.
"""

from pdmesh.errors import HandshakeRefused

PROTOCOL_MIN = 1
"""Oldest version this build speaks."""
PROTOCOL_MAX = 1
"""Newest version this build speaks."""


def agree(
    peer_min: int, peer_max: int, *, own_min: int = PROTOCOL_MIN, own_max: int = PROTOCOL_MAX, peer: str = "the peer"
) -> int:
    """Return the highest version both ranges hold. Raises HandshakeRefused, naming both ranges, when there is none."""
    version = min(own_max, peer_max)
    if version < max(own_min, peer_min):
        raise HandshakeRefused(
            f"{peer} speaks protocol versions {peer_min} to {peer_max}, this service {own_min} to {own_max}: "
            "run releases whose ranges meet"
        )
    return version
