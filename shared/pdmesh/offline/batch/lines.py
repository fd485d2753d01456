"""Lines of OpenAI batch files: requests in, answers out. Whatever a line holds, there is an answer to it."""

import uuid
from dataclasses import dataclass
from typing import Any

import msgspec

from pdmesh.errors import InvalidRequest, MeshError, NotFound, TooLarge
from pdmesh.openai.http.errors import envelope
from pdmesh.openai.schemas.answers import ErrorDetail, encode

MAX_LINE_BYTES = 64 << 20
MAX_CUSTOM_ID_CHARS = 512
URLS = ("/v1/chat/completions", "/v1/completions")


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchRequest:
    """One sound line."""

    custom_id: str
    url: str
    body: bytes
    """JSON."""


class BatchResponse(msgspec.Struct, frozen=True, kw_only=True):
    status_code: int
    request_id: str
    body: msgspec.Raw
    """What the HTTP API would have answered."""


class BatchAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """One line of the output."""

    id: str
    custom_id: str | None
    response: BatchResponse
    error: ErrorDetail | None
    """Also for a failure that `response` tells, as vLLM has it."""


class _Line(msgspec.Struct, kw_only=True):
    custom_id: Any = None
    method: Any = None
    url: Any = None
    body: msgspec.Raw = msgspec.Raw(b"null")


_decode_line = msgspec.json.Decoder(_Line).decode


class CustomIds:
    """Those seen so far; each may be there once."""

    def __init__(self) -> None:
        self._line_of: dict[str, int] = {}

    def enter(self, custom_id: str, number: int) -> None:
        """Raises InvalidRequest when an earlier line has it."""
        first = self._line_of.setdefault(custom_id, number)
        if first != number:
            raise InvalidRequest(f"custom_id {custom_id[:100]!r} is that of line {first} already", param="custom_id")


class LineFault(Exception):
    """A line that is no request; `error` says why, `custom_id` whose it is, when that can be read."""

    def __init__(self, error: MeshError, custom_id: str | None) -> None:
        super().__init__(error.message)
        self.error = error
        self.custom_id = custom_id


def read_line(line: bytes, number: int, known: CustomIds) -> BatchRequest:
    """Take line `number` (from 1). Raises LineFault."""
    custom_id: str | None = None
    try:
        if len(line) > MAX_LINE_BYTES:
            raise TooLarge(f"line {number} has {len(line)} bytes, more than {MAX_LINE_BYTES}")
        try:
            given = _decode_line(line)
        except (msgspec.DecodeError, UnicodeDecodeError) as exc:
            raise InvalidRequest(f"line {number} is no JSON object: {exc}") from exc
        except RecursionError:
            raise InvalidRequest(f"line {number} is nested too deeply") from None
        custom_id = _custom_id(given, number)
        known.enter(custom_id, number)
        _check_target(given)
        return BatchRequest(custom_id=custom_id, url=given.url, body=bytes(given.body))
    except MeshError as exc:
        raise LineFault(exc, custom_id) from exc


def answer_line(custom_id: str | None, request_id: str, body: msgspec.Struct) -> bytes:
    """Return the output line of an answer."""
    return _line(custom_id, request_id, 200, encode(body), None)


def failure_line(custom_id: str | None, request_id: str, error: MeshError) -> bytes:
    """Return the output line of a failure."""
    told = envelope(error)
    return _line(custom_id, request_id, error.status, encode(told), told.error)


def _line(custom_id: str | None, request_id: str, status: int, body: bytes, error: ErrorDetail | None) -> bytes:
    answer = BatchAnswer(
        id=f"batch_req_{uuid.uuid4().hex}",
        custom_id=custom_id,
        response=BatchResponse(status_code=status, request_id=request_id, body=msgspec.Raw(body)),
        error=error,
    )
    return encode(answer) + b"\n"


def _custom_id(given: _Line, number: int) -> str:
    custom_id = given.custom_id
    if not isinstance(custom_id, str) or not 0 < len(custom_id) <= MAX_CUSTOM_ID_CHARS:
        raise InvalidRequest(
            f"line {number}: custom_id must be a string of 1 to {MAX_CUSTOM_ID_CHARS} characters", param="custom_id"
        )
    return custom_id


def _check_target(given: _Line) -> None:
    if given.method != "POST":
        raise InvalidRequest(f"method must be 'POST', got {str(given.method)[:40]!r}", param="method")
    if given.url not in URLS:
        raise NotFound(f"url {str(given.url)[:200]!r} is not supported; supported are {', '.join(URLS)}", param="url")
