"""Whether the engines of a mesh can hand KV to each other, from what each said with its readiness."""

from collections.abc import Iterable, Mapping

# What two engines must have alike, by the name of the fact, and how people call it.
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
    """One line for each prefill that cannot hand over to some decode, naming what differs; facts by engine name."""
    return [
        f"warning: {prefill} cannot hand over to {decode}: {'; '.join(differences)}; "
        "requests that meet there are computed by decode alone"
        for prefill, given in prefills.items()
        for decode, taken in decodes.items()
        if (differences := _differences(given, taken))
    ]


def _differences(given: Mapping[str, object], taken: Mapping[str, object]) -> list[str]:
    differing = {name for name in given.keys() & taken.keys() if given[name] != taken[name]}
    called = {name: what for name, (what, parts) in FINGERPRINTS.items() if not parts & differing} | ALIKE
    found = [f"{what} {given[name]} and {taken[name]} differ" for name, what in called.items() if name in differing]
    if "connectors" in given and "connectors" in taken:
        ours, theirs = _names(given["connectors"]), _names(taken["connectors"])
        if not set(ours) & set(theirs):
            found.append(f"connectors {','.join(ours)} and {','.join(theirs)} have none in common")
    return found


def _names(value: object) -> list[str]:
    return [str(item) for item in value] if isinstance(value, Iterable) else []
