"""Every failure as an HTTP answer in OpenAI's envelope, and as an event for streams that have begun."""

import math
from typing import Any

from fastapi.responses import Response
from pydantic import ValidationError

from pdmesh.errors import RETRY_AFTER_S, Draining, MeshError, Overloaded, PeerUnavailable
from pdmesh.openai.answer.base import event
from pdmesh.openai.schemas.answers import ErrorDetail, ErrorEnvelope, encode

MAX_SHOWN_ERRORS = 10
MAX_SHOWN_INPUT_CHARS = 200
SCHEMA_ERROR_TYPE = "Bad Request"


class SchemaError(MeshError):
    """The body is no JSON object of the right shape; 400 with vLLM's type for it."""

    status = 400
    openai_type = SCHEMA_ERROR_TYPE


def schema_error(exc: ValidationError) -> SchemaError:
    """Say what pydantic found, bounded in number and length."""
    errors = exc.errors(include_url=False, include_context=False)
    lines = [
        f"  {_place(error['loc'])}: {error['msg']} (got {_shown(error['input'])})"
        for error in errors[:MAX_SHOWN_ERRORS]
    ]
    count = f"{len(errors)} validation error{'s' if len(errors) > 1 else ''}:"
    return SchemaError("\n".join([count, *lines]), param=_place(errors[0]["loc"]))


def envelope(error: MeshError) -> ErrorEnvelope:
    return ErrorEnvelope(
        error=ErrorDetail(message=error.message, type=error.openai_type, param=error.param, code=error.status)
    )


def error_response(error: MeshError, headers: dict[str, str] | None = None) -> Response:
    """Answer with the error's own status; what may be retried soon says when."""
    sent = dict(headers or {})
    if isinstance(error, Overloaded | PeerUnavailable | Draining) or error.retry_after_s is not None:
        sent["Retry-After"] = str(math.ceil(error.retry_after_s or RETRY_AFTER_S))
    if error.status == 401:
        sent["WWW-Authenticate"] = "Bearer"
    return Response(encode(envelope(error)), error.status, sent, "application/json")


def error_event(error: MeshError) -> bytes:
    return event(envelope(error))


def _place(loc: tuple[int | str, ...]) -> str:
    return ".".join(["body", *(str(part) for part in loc)])


def _shown(value: Any) -> str:
    shown = repr(value)
    return shown if len(shown) <= MAX_SHOWN_INPUT_CHARS else shown[:MAX_SHOWN_INPUT_CHARS] + "…"
