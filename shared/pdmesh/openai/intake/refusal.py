"""How a bad value is refused: as vLLM words it, with the field in `param`, and the value, cut, at the end."""

from typing import Any, NoReturn

from pdmesh.errors import InvalidRequest

MAX_SHOWN_CHARS = 100


def refuse(name: str, message: str, value: Any = None) -> NoReturn:
    """Raise InvalidRequest for the field `name`."""
    shown = f" (parameter={name}, value={str(value)[:MAX_SHOWN_CHARS]})" if value is not None else ""
    raise InvalidRequest(message + shown, param=name)
