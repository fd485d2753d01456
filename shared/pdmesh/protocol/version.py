"""Which version of the wire two services speak: each states a range, the highest common version is used.

Ranges, never equality: during a rolling upgrade old and new services work together as long as their ranges meet.
A field that is added within a version means, where it is not sent, what was meant before it was there; what has to be
understood to be safe makes a new version, or a range in `capabilities.py` of its own. A field's number and type never change.
"""

from pdmesh.errors import HandshakeRefused

PROTOCOL_VERSION = 2
"""Newest version this build speaks."""
PROTOCOL_MIN = 1
"""Oldest version this build speaks: at least that of the release before."""
HISTORY: dict[int, str] = {
    1: "The first. Added within it: Sampling.repetition_detection, .thinking and .extra_args, a 64-bit "
    "GenerateRequest.priority, BlockList.first_block (0 wherever groups are full).",
    2: "Describe and Handshake tell capabilities; a peer of version 1 has those of the first release. The answer to an end "
    "tells who answers, how the transfer has ended there, and whether the owner may still write. An end that overtakes "
    "its begin is heeded. Added within it, behind the capability `push`: SubmitFrame.expectations, GenerateRequest.offer_id, "
    "ControlUp.withdraw_expectations, KVPeer.Push.",
}
"""What each version brought."""


def agree(
    peer_min: int,
    peer_max: int,
    *,
    own_min: int = PROTOCOL_MIN,
    own_max: int = PROTOCOL_VERSION,
    peer: str = "the peer",
) -> int:
    """Return the highest version both ranges hold. Raises HandshakeRefused, naming both ranges, when there is none."""
    version = min(own_max, peer_max)
    if version < max(own_min, peer_min):
        raise HandshakeRefused(
            f"{peer} speaks protocol versions {peer_min} to {peer_max}, this service {own_min} to {own_max}: "
            "run releases whose ranges meet"
        )
    return version
