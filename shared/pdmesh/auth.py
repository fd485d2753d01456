"""Who may call a service's gRPC methods: whoever proves the mesh secret, and anyone who asks for its health.

With mutual TLS the certificate of who connects names the mesh besides: an authority may sign others' certificates too.
"""

from __future__ import annotations

import contextlib
import hmac
import inspect
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, TypeAlias

import grpc
import grpc.aio

from pdmesh.security import AUTH_METADATA_KEY, MeshSecret

Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"
Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"


class AuthInterceptor(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]
    """Refuse calls without the mesh's proof, but for health checks. Remembers the handler of each method."""

    def __init__(self, secret: MeshSecret) -> None:
        self._expected = secret.mac("grpc", b"").hex()
        self._name = secret.certificates.server_name if secret.certificates is not None else ""
        self._guarded: dict[str, Handler] = {}

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Handler]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Handler:
        handler = await continuation(handler_call_details)
        if handler_call_details.method.startswith("/grpc.health.v1.Health/") or handler is None:
            return handler
        given = dict(handler_call_details.invocation_metadata or ()).get(AUTH_METADATA_KEY, "")
        if not hmac.compare_digest(str(given).encode(), self._expected.encode()):
            return REFUSED
        if not self._name:
            return handler
        method = handler_call_details.method
        if method not in self._guarded:
            self._guarded[method] = _require_name(handler, self._name)
        return self._guarded[method]


def _require_name(handler: Handler, name: str) -> Handler:
    """Make a handler of the same kind that answers only those whose certificate carries `name`."""
    kind = f"{'stream' if handler.request_streaming else 'unary'}_{'stream' if handler.response_streaming else 'unary'}"
    behavior = getattr(handler, kind)

    async def answer(request: Any, context: Context) -> Any:
        await _check_name(context, name)
        return await behavior(request, context)

    async def answer_all(request: Any, context: Context) -> AsyncIterator[Any]:
        await _check_name(context, name)
        async with contextlib.aclosing(behavior(request, context)) as messages:
            async for message in messages:
                yield message

    make: Any = getattr(grpc, f"{kind}_rpc_method_handler")
    made: Handler = make(
        answer_all if inspect.isasyncgenfunction(behavior) else answer,
        handler.request_deserializer,
        handler.response_serializer,
    )
    return made


async def _check_name(context: Context, name: str) -> None:
    if name.encode() not in (context.auth_context().get("x509_subject_alternative_name") or ()):
        await context.abort(
            grpc.StatusCode.UNAUTHENTICATED, f"the certificate that was shown does not name {name} (tls-server-name)"
        )


async def _refuse(request: Any, context: Context) -> None:
    await context.abort(grpc.StatusCode.UNAUTHENTICATED, "the mesh secret is missing or differs")


# A stream, for calls of every kind: a server reads and decodes a single message before its handler is asked, of up to the
# largest size and from anyone. A stream is refused unread.
REFUSED: Handler = grpc.stream_stream_rpc_method_handler(_refuse)
