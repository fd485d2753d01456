"""Who may call a service's gRPC methods: whoever proves the mesh secret, and anyone who asks for its health."""

from __future__ import annotations

import hmac
from collections.abc import Awaitable, Callable
from typing import Any

import grpc
import grpc.aio

from pdmesh.security import AUTH_METADATA_KEY, MeshSecret


class AuthInterceptor(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]
    """Refuse calls without the mesh's proof, but for health checks."""

    def __init__(self, secret: MeshSecret) -> None:
        self._expected = secret.mac("grpc", b"").hex()

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler[Any, Any]]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler[Any, Any]:
        handler = await continuation(handler_call_details)
        if handler_call_details.method.startswith("/grpc.health.v1.Health/") or handler is None:
            return handler
        given = dict(handler_call_details.invocation_metadata or ()).get(AUTH_METADATA_KEY, "")
        if hmac.compare_digest(str(given).encode(), self._expected.encode()):
            return handler
        return _refuse_like(handler)


def _refuse_like(handler: grpc.RpcMethodHandler[Any, Any]) -> grpc.RpcMethodHandler[Any, Any]:
    """Make a handler of the same kind that ends every call with UNAUTHENTICATED."""

    async def refuse_unary(request: Any, context: grpc.aio.ServicerContext[Any, Any]) -> Any:
        await context.abort(grpc.StatusCode.UNAUTHENTICATED, "the mesh secret is missing or differs")

    async def refuse_stream(request: Any, context: grpc.aio.ServicerContext[Any, Any]) -> Any:
        await context.abort(grpc.StatusCode.UNAUTHENTICATED, "the mesh secret is missing or differs")
        yield  # makes this an async generator, as streaming handlers are

    make: Any = {
        (False, False): grpc.unary_unary_rpc_method_handler,
        (False, True): grpc.unary_stream_rpc_method_handler,
        (True, False): grpc.stream_unary_rpc_method_handler,
        (True, True): grpc.stream_stream_rpc_method_handler,
    }[(handler.request_streaming, handler.response_streaming)]
    refuse = refuse_stream if handler.response_streaming else refuse_unary
    made: grpc.RpcMethodHandler[Any, Any] = make(refuse, handler.request_deserializer, handler.response_serializer)
    return made
