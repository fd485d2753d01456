"""Which version of the wire two services speak: each states a range, the highest common version is used.

Ranges, never equality: during a rolling upgrade old and new services work together as long as their ranges meet.
A field that is added within a version means, where it is not sent, what was meant before it was there; what has to be
understood to be safe makes a new version. Added to version 1 after its first build: Sampling.repetition_detection, .thinking and
.extra_args, a 64-bit GenerateRequest.priority, BlockList.first_block (0 wherever groups are full).
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
