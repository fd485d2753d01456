"""What `pdmesh` itself exports, imported when it is asked for: `import pdmesh` stays cheap, and free of torch."""

import importlib

OFFLINE = ("LLM", "BeamSearchParams", "SamplingParams")


def load(name: str) -> object:
    """Return an export of `pdmesh` by its name, as a module's `__getattr__` does. Raises AttributeError."""
    if name in OFFLINE:
        return getattr(importlib.import_module("pdmesh.offline"), name)
    raise AttributeError(f"module 'pdmesh' has no attribute {name!r}")
