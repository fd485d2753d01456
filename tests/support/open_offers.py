"""An owner's and a consumer's server over real gRPC, their cores played: decode asks for an offer that is computed yet."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from typing import Any

from pdmesh.engine.messages import AddRequest
from pdmesh.engine.server.assembly import Engine
from pdmesh.protocol.messages import AwaitedOffer, GenerateRequest
from pdmesh.security import MeshSecret
from pdmesh.servers import grpc_server
from support.engines import SECRET, request
from support.held_engine import HeldCore, Inbox, held_engine

OFFER = "0123456789abcdef" * 2


class Side:
    """One engine: what it was sent, and what it answered."""

    def __init__(self, core: HeldCore, engine: Engine, address: str) -> None:
        self.core, self.engine, self.address = core, engine, address

    def submit(self, made: GenerateRequest) -> Inbox:
        inbox = Inbox()
        self.engine.servicer._submission.submit(made, inbox)
        return inbox

    @property
    def added(self) -> list[AddRequest]:
        return [message for message in self.core.sent if isinstance(message, AddRequest)]


def between(scene: Callable[[Side, Side], Awaitable[None]], **settings: Any) -> None:
    """Play a scene with an owner and a consumer."""

    async def body() -> None:
        async with contextlib.AsyncExitStack() as stack:
            sides = []
            for options in ({}, settings):
                core = HeldCore()
                engine = await stack.enter_async_context(held_engine(core, **options))
                port = await stack.enter_async_context(grpc_server("127.0.0.1", 0, MeshSecret(SECRET), engine.register))
                engine.handoff.owner.set_metadata("shm", b"")
                sides.append(Side(core, engine, f"127.0.0.1:{port}"))
            await scene(sides[0], sides[1])

    asyncio.run(body())


def decode_leg(owner: Side, offer_id: str = OFFER, **fields: Any) -> GenerateRequest:
    owner_id = owner.engine.handoff.owner.peer_id
    awaits = AwaitedOffer(offer_id=offer_id, owner_id=owner_id, owner_address=owner.address)
    return request("d", awaits=awaits, **fields)
