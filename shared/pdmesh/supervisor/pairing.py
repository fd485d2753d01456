"""Whether the engines of a mesh can hand KV to each other, from what each said with its readiness."""

from collections.abc import Iterable, Mapping

# What two engines must have alike, by the name of the fact, and how people call it.
ALIKE = {"model_fingerprint": "model", "dtype": "dtype", "block_size": "block size", "layout": "KV layout"}


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
    found = [
        f"{called} {given[name]} and {taken[name]} differ"
        for name, called in ALIKE.items()
        if name in given and name in taken and given[name] != taken[name]
    ]
    if "connectors" in given and "connectors" in taken:
        ours, theirs = _names(given["connectors"]), _names(taken["connectors"])
        if not set(ours) & set(theirs):
            found.append(f"connectors {','.join(ours)} and {','.join(theirs)} have none in common")
    # A layout is a name made of the others: it tells something new only when they are alike.
    return found[:-1] if len(found) > 1 and found[-1].startswith(ALIKE["layout"]) else found


def _names(value: object) -> list[str]:
    return [str(item) for item in value] if isinstance(value, Iterable) else []
