"""Settings whose value is a JSON object, as vLLM has them."""

import json
from typing import Any

from pdmesh.errors import ConfigError


def parse_object(setting: str, text: str) -> dict[str, Any]:
    """Return the object in `text`. Raises ConfigError that names the setting."""
    try:
        values = json.loads(text)
    except (ValueError, RecursionError) as exc:
        raise ConfigError(f"{setting}: {text[:80]!r} is not JSON: {exc}") from None
    if not isinstance(values, dict):
        raise ConfigError(f"{setting}: {text[:80]!r} is not a JSON object")
    return values
