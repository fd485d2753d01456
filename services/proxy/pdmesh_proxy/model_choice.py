"""Which model a mesh serves, of those that its engines have: pure functions of what the engines tell.

Two proxies that reach the same engines choose the same, whatever came first and without a word between them: what they chose
before does not count, or the first engine to start would decide for the mesh.

Engines that decode must be alike to the last digit, or a request that is resumed would change its mind. One that only
prefills may compute or keep its numbers in another dtype where decode converts its KV: the weights must be the same.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from pdmesh.protocol.exchange import KVNames, have_same_weights


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """An engine that answers."""

    names: KVNames
    can_decode: bool
    draining: bool = False


def choose_model(current: KVNames | None, candidates: Sequence[Candidate], *, wanted: str = "") -> KVNames | None:
    """Return the names of the model for new requests; `current` where no engine has one that may be served.

    The model with which most engines can be used; of several the one that more engines decode, then the least fingerprint.
    Engines that shut down do not count while there are others. `wanted`: how the model's fingerprint must begin.
    """
    named = [each for each in candidates if each.names.model_fingerprint.startswith(wanted)]
    voters = [each for each in named if not each.draining] or named
    if not voters:
        return current
    counted = [each for each in candidates if not each.draining] or candidates

    def order(names: KVNames) -> tuple[int, int, str]:
        usable = [each for each in counted if serves(each, names)]
        return -len(usable), -sum(each.can_decode for each in usable), names.model_fingerprint

    return min((each.names for each in voters), key=order)


def serves(candidate: Candidate, current: KVNames | None) -> bool:
    """Whether an engine may be used where `current` is the model in use."""
    if current is None:
        return False
    if candidate.names.model_fingerprint == current.model_fingerprint:
        return True
    return not candidate.can_decode and have_same_weights(candidate.names.description, current.description)
