"""Fields whose feature this server does not have: asking for one is a 400 that names it, never a silent no."""

from collections.abc import Mapping
from typing import Any

from pdmesh.errors import InvalidRequest

_NOT_YET = "is not supported by this server yet"

REFUSED: dict[str, str] = {
    "suffix": "is not supported: no model with fill-in-the-middle is served",
    "prompt_embeds": _NOT_YET,
    "structured_outputs": _NOT_YET,
    "guided_json": "was removed from the API; structured outputs are not supported by this server yet",
    "guided_regex": "was removed from the API; structured outputs are not supported by this server yet",
    "guided_choice": "was removed from the API; structured outputs are not supported by this server yet",
    "guided_grammar": "was removed from the API; structured outputs are not supported by this server yet",
    "functions": "is replaced by tools in the API",
    "function_call": "is replaced by tool_choice in the API",
    "audio": "is not supported: the served model is text only",
    "logprob_token_ids": _NOT_YET,
    "return_token_offsets": _NOT_YET,
    "routed_experts_prompt_start": _NOT_YET,
    "watermarking": _NOT_YET,
    "mm_payload": "is not supported: the served model is text only",
    "mm_processor_kwargs": "is not supported: the served model is text only",
    "media_io_kwargs": "is not supported: the served model is text only",
    "ec_transfer_params": "is not supported: the served model is text only",
    "ticket": "is never accepted from clients",
}
"""Field to the rest of the sentence. `null`, false, and empty values do not ask for anything."""


def refuse_unsupported(fields: Mapping[str, Any]) -> None:
    """Raise InvalidRequest for the first of the client's fields that asks for what is not there."""
    for name, value in fields.items():
        if name in REFUSED and value not in (None, False, "", [], {}):
            raise InvalidRequest(f"{name} {REFUSED[name]}", param=name)
    _refuse_values(fields)


def _refuse_values(fields: Mapping[str, Any]) -> None:
    """The fields of which only some values are supported."""
    kind = _type_of(fields.get("response_format"))
    if kind not in (None, "text"):
        raise InvalidRequest(f"response_format of type {kind!r} {_NOT_YET}; only 'text' is", param="response_format")
    if fields.get("best_of") not in (None, 1, fields.get("n")):
        raise InvalidRequest("best_of is not supported; use n", param="best_of")
    if fields.get("stream_interval") not in (None, 1):
        raise InvalidRequest(
            f"stream_interval of a request {_NOT_YET}; an engine's --stream-interval is for all",
            param="stream_interval",
        )
    modalities = fields.get("modalities")
    if modalities not in (None, [], ["text"]):
        raise InvalidRequest("modalities other than ['text'] are not supported", param="modalities")


def _type_of(response_format: Any) -> Any:
    return response_format.get("type", "missing") if isinstance(response_format, dict) else response_format
