"""Settings whose value is a JSON object, as vLLM has them."""

import json
from typing import Any

from pdmesh.errors import ConfigError


def parse_object(setting: str, text: str) -> dict[str, Any]:
    """Return the object in `text`. Raises ConfigError that names the setting."""
    try:
        values = json.loads(text)
    except (ValueError, RecursionError) as exc:
        bare = text.startswith("{") and '"' not in text
        hint = (
            "; a shell, or --prefill-args, takes its quotes away unless the whole is in single quotes" if bare else ""
        )
        raise ConfigError(f"{setting}: {text[:80]!r} is not JSON: {exc}{hint}") from None
    if not isinstance(values, dict):
        raise ConfigError(f"{setting}: {text[:80]!r} is not a JSON object")
    return values
