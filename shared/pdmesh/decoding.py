"""What a gRPC server answers to a message that is not one, or whose handler raises InvalidRequest: INVALID_ARGUMENT and a line.

By itself gRPC answers UNKNOWN and logs a traceback, as if the server were at fault.
"""

from __future__ import annotations

import contextlib
import inspect
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, TypeAlias

import grpc
import grpc.aio
from google.protobuf.message import DecodeError

from pdmesh.errors import InvalidRequest

log = logging.getLogger(__name__)

Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"
Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"


class Undecodable(InvalidRequest):
    """A message on the wire is no protobuf of its type. Handlers get it from `context.read()` and let it pass."""


class DecodeInterceptor(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]
    """Refuse undecodable messages. Innermost of the interceptors, as it remembers the handler of each method."""

    def __init__(self) -> None:
        self._guarded: dict[str, Handler] = {}

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Handler]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Handler:
        method = handler_call_details.method
        if method not in self._guarded:
            handler = await continuation(handler_call_details)
            if handler is None:
                return handler
            self._guarded[method] = _guard(method, handler)
        return self._guarded[method]


def _guard(method: str, handler: Handler) -> Handler:
    """Make a handler of the same kind that refuses what cannot be decoded, or what the handler finds invalid."""
    kind = f"{'stream' if handler.request_streaming else 'unary'}_{'stream' if handler.response_streaming else 'unary'}"
    behavior = getattr(handler, kind)

    async def answer(request: Any, context: Context) -> Any:
        try:
            return await behavior(_decoded(request), context)
        except InvalidRequest as exc:
            await _refuse(method, exc, context)

    async def answer_all(request: Any, context: Context) -> AsyncIterator[Any]:
        try:
            # Closed with us, so that what it holds is free when the caller is gone.
            async with contextlib.aclosing(behavior(_decoded(request), context)) as messages:
                async for message in messages:
                    yield message
        except InvalidRequest as exc:
            await _refuse(method, exc, context)

    decode = handler.request_deserializer
    make: Any = getattr(grpc, f"{kind}_rpc_method_handler")
    made: Handler = make(
        answer_all if inspect.isasyncgenfunction(behavior) else answer,
        decode and _deserializer(decode, raises=handler.request_streaming),
        handler.response_serializer,
    )
    return made


def _deserializer(decode: Callable[[bytes], Any], *, raises: bool) -> Callable[[bytes], Any]:
    """Raise Undecodable where a handler reads by itself; elsewhere return it, as nobody but gRPC would catch it."""

    def deserialize(data: bytes) -> Any:
        try:
            return decode(data)
        except DecodeError:
            error = Undecodable(f"a message of {len(data)} bytes cannot be decoded")
            if raises:
                raise error from None
            return error

    return deserialize


def _decoded(request: Any) -> Any:
    if isinstance(request, Undecodable):
        raise request
    return request


async def _refuse(method: str, error: InvalidRequest, context: Context) -> None:
    log.warning("%s from %s: %s", method, context.peer(), error.message)
    await context.abort(grpc.StatusCode.INVALID_ARGUMENT, error.message)
