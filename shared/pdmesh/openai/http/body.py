"""Reads a request's body within its bound and turns it into a schema, with every mistake a 400 that says what it is."""

import asyncio
from typing import Any, TypeVar

import pydantic_core
from fastapi import Request
from pydantic import ValidationError
from starlette.requests import ClientDisconnect

from pdmesh.config import HttpConfig
from pdmesh.errors import TooLarge, TooSlow
from pdmesh.openai.http.disconnect import ClientGone
from pdmesh.openai.http.errors import SchemaError, schema_error
from pdmesh.openai.http.header_fields import decimal
from pdmesh.openai.schemas import RequestBody

BodyT = TypeVar("BodyT", bound=RequestBody)


async def read_body(request: Request, schema: type[BodyT], config: HttpConfig) -> tuple[BodyT, dict[str, Any]]:
    """Return the body as `schema` and as it came. Raises TooLarge, TooSlow, SchemaError, ClientGone."""
    media_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if media_type != "application/json":
        raise SchemaError("Unsupported Media Type: Only 'application/json' is allowed", param="header.content-type")
    return parse_body(await _read(request, config), schema)


def parse_body(data: bytes, schema: type[BodyT]) -> tuple[BodyT, dict[str, Any]]:
    try:
        # Bounded in depth, unlike the standard library's parser.
        raw = pydantic_core.from_json(data)
    except ValueError as exc:
        raise SchemaError(f"json_invalid: the body is not JSON: {exc}", param="body") from exc
    if not isinstance(raw, dict):
        raise SchemaError(f"the body must be a JSON object, not {type(raw).__name__}", param="body")
    try:
        return schema.model_validate(raw), raw
    except ValidationError as exc:
        raise schema_error(exc) from exc


async def _read(request: Request, config: HttpConfig) -> bytes:
    if (decimal(request.headers.get("content-length", "")) or 0) > config.max_body_bytes:
        raise _too_large(config.max_body_bytes)
    data = bytearray()
    loop = asyncio.get_running_loop()
    end = loop.time() + config.request_timeout_s
    try:
        async with asyncio.timeout(min(config.body_timeout_s, config.request_timeout_s)) as patience:
            async for chunk in request.stream():
                data += chunk
                if len(data) > config.max_body_bytes:
                    raise _too_large(config.max_body_bytes)
                patience.reschedule(min(end, loop.time() + config.body_timeout_s))
    except TimeoutError:
        raise TooSlow(
            f"the request body paused for {config.body_timeout_s:g} s or took over {config.request_timeout_s:g} s",
            param="body",
        ) from None
    except ClientDisconnect:
        raise ClientGone from None
    return bytes(data)


def _too_large(max_bytes: int) -> TooLarge:
    return TooLarge(f"the request body is larger than {max_bytes} bytes", param="body")
