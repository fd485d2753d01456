"""Whether the engines of a mesh compute with what was wanted, from what each said with its readiness."""

from collections.abc import Mapping


def fallbacks(engines: Mapping[str, Mapping[str, object]]) -> list[str]:
    """One line for each engine in which PyTorch stands in for the CPU library; facts by engine name."""
    return [
        f"warning: {name} computes with PyTorch, several times slower, since the CPU library cannot "
        f"({facts['backend_fallback']}); its log says more"
        for name, facts in engines.items()
        if facts.get("backend_fallback")
    ]
