"""Which model a mesh serves, of those that its engines have: pure functions of what the engines tell.

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


def choose_model(current: KVNames | None, candidates: Sequence[Candidate]) -> KVNames | None:
    """Return the names of the model to serve from now on; None while no engine has answered.

    The one in use stays while an engine has it. A prefill's gives way to that of the first decode with the same weights. When
    nobody has it any more, the one takes over with which most engines can be used, a decode's before a prefill's.
    """
    decodes = [each.names for each in candidates if each.can_decode]
    voters = decodes or [each.names for each in candidates]
    if not voters:
        return current
    if current is not None:
        if any(names.model_fingerprint == current.model_fingerprint for names in voters):
            return current
        kin = [names for names in voters if have_same_weights(names.description, current.description)]
        if not kin and any(each.names.model_fingerprint == current.model_fingerprint for each in candidates):
            return current
        voters = kin or voters
    return max(voters, key=lambda names: sum(serves(each, names) for each in candidates))


def serves(candidate: Candidate, current: KVNames | None) -> bool:
    """Whether an engine may be used where `current` is the model in use."""
    if current is None:
        return False
    if candidate.names.model_fingerprint == current.model_fingerprint:
        return True
    return not candidate.can_decode and have_same_weights(candidate.names.description, current.description)
