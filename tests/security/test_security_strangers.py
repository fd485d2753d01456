"""Callers without the mesh's secret: what they send is not even read."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
import grpc.aio
import pytest

from pdmesh.grpc_options import GRPC_OPTIONS
from pdmesh.security import AUTH_METADATA_KEY, MeshSecret
from pdmesh.servers import grpc_server

SECRET = MeshSecret("a mesh secret for tests only")
LARGE = bytes(40 << 20)
KINDS = ["unary_unary", "unary_stream", "stream_unary", "stream_stream"]


@pytest.mark.parametrize("kind", KINDS)
def test_message_of_a_stranger_is_refused_before_it_is_decoded(kind: str) -> None:
    """Every unary method took and decoded messages of the largest size from anyone, and said no afterwards."""
    decoded: list[int] = []

    def decode(data: bytes) -> bytes:
        decoded.append(len(data))
        return data

    async def answer(request: Any, context: Any) -> bytes:
        if kind.startswith("stream"):
            request = await anext(aiter(request))
        return bytes(request[:1])

    async def answers(request: Any, context: Any) -> Any:
        yield await answer(request, context)

    def register(server: grpc.aio.Server) -> list[str]:
        make: Any = getattr(grpc, f"{kind}_rpc_method_handler")
        handler = make(answers if kind.endswith("stream") else answer, request_deserializer=decode)
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("pdmesh.v1.Test", {"Call": handler}),))
        return []

    async def call(channel: grpc.aio.Channel, metadata: Any) -> tuple[grpc.StatusCode, str | None]:
        method = getattr(channel, kind)("/pdmesh.v1.Test/Call")
        made = method(iter([LARGE]) if kind.startswith("stream") else LARGE, metadata=metadata, timeout=20)
        try:
            if kind.endswith("stream"):
                async for _ in made:
                    pass
            else:
                await made
        except grpc.aio.AioRpcError as exc:
            return exc.code(), exc.details()
        return grpc.StatusCode.OK, None

    async def go() -> None:
        async with (
            grpc_server("127.0.0.1", 0, SECRET, register) as port,
            grpc.aio.insecure_channel(f"127.0.0.1:{port}", options=GRPC_OPTIONS) as channel,
        ):
            for stranger in (None, ((AUTH_METADATA_KEY, "wrong"),), MeshSecret("another secret of 16").call_metadata()):
                code, details = await call(channel, stranger)
                assert (code, details) == (
                    grpc.StatusCode.UNAUTHENTICATED,
                    "the mesh secret is missing or differs",
                )
            assert decoded == []
            await call(channel, SECRET.call_metadata())
            assert decoded == [len(LARGE)]

    asyncio.run(go())
