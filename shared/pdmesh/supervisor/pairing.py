"""Whether the engines of a mesh can hand KV to each other, from what each said with its readiness."""

from collections.abc import Iterable, Mapping

import msgspec

from pdmesh.errors import HandshakeRefused
from pdmesh.protocol.capabilities import OWN
from pdmesh.protocol.exchange import Exchange, KVDescription, KVNames, exchange

# What two engines must have alike, or convert, by the name of the fact, and how people call it.
ALIKE = {
    "backend": "backend",
    "dtype": "dtype",
    "quantization": "quantization",
    "kv_dtype": "KV cache's dtype",
    "block_size": "block size",
}
# Names made of those and of more, with what of those is in them: they tell something new only where that is alike.
FINGERPRINTS = {
    "model_fingerprint": ("model", {"dtype", "quantization", "kv_dtype"}),
    "layout": ("KV layout", {"backend", "dtype", "kv_dtype", "block_size"}),
}


def unpaired(prefills: Mapping[str, Mapping[str, object]], decodes: Mapping[str, Mapping[str, object]]) -> list[str]:
    """One line for each prefill that cannot hand over to some decode, or only by conversion, naming what differs; facts by
    engine name."""
    lines = []
    for prefill, given in prefills.items():
        for decode, taken in decodes.items():
            differences, obstacles = _differences(given, taken), _connector_obstacles(given, taken)
            kind = _exchange(given, taken) if differences and not obstacles else None
            if kind is None and (found := differences + obstacles):
                lines.append(
                    f"warning: {prefill} cannot hand over to {decode}: {'; '.join(found)}; "
                    "requests that meet there are computed by decode alone"
                )
            elif kind is not None:
                effect = (
                    "tokens are the same"
                    if kind is Exchange.REPACKED
                    else "numbers are rounded, which may change tokens"
                )
                lines.append(
                    f"note: {prefill} hands over to {decode} by conversion: {'; '.join(differences)}; {effect}"
                )
    return lines


def _exchange(given: Mapping[str, object], taken: Mapping[str, object]) -> Exchange | None:
    """How KV gets from one to the other; None when it does not."""
    try:
        return exchange(_kv_names(given), _kv_names(taken))
    except HandshakeRefused:
        return None


def _kv_names(facts: Mapping[str, object]) -> KVNames:
    told = facts.get("kv")
    return KVNames(
        model_fingerprint=str(facts.get("model_fingerprint", "")),
        layout_fingerprints=tuple(str(facts.get("layout", "")).split(",")),
        description=None if told is None else msgspec.convert(told, KVDescription),
        capabilities=OWN,
    )


def _differences(given: Mapping[str, object], taken: Mapping[str, object]) -> list[str]:
    differing = {name for name in given.keys() & taken.keys() if given[name] != taken[name]}
    called = {name: what for name, (what, parts) in FINGERPRINTS.items() if not parts & differing} | ALIKE
    return [f"{what} {given[name]} and {taken[name]} differ" for name, what in called.items() if name in differing]


def _connector_obstacles(given: Mapping[str, object], taken: Mapping[str, object]) -> list[str]:
    if "connectors" in given and "connectors" in taken:
        ours, theirs = _names(given["connectors"]), _names(taken["connectors"])
        if not set(ours) & set(theirs):
            return [f"connectors {','.join(ours)} and {','.join(theirs)} have none in common"]
    return []


def _names(value: object) -> list[str]:
    return [str(item) for item in value] if isinstance(value, Iterable) else []
