"""A decode that shuts down, or whose core dies, while the owner of a push to it gives no word on whether it still writes."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress

import psutil
import pytest

from pdmesh.connector.owner import Context, PoolOwner
from pdmesh.connector.pool import PoolShape
from pdmesh.errors import InternalError
from pdmesh.protocol import mesh_pb2 as pb
from pdmesh.protocol.offers import OfferTable
from pdmesh.protocol.pushes import Expectation, PushOrder, PushProgress, expectation_to_pb, progress_to_pb
from pdmesh.security import MeshSecret
from pdmesh.servers import grpc_server
from support.engines import SECRET, RunningEngine, loop_thread, proxy_session, start_engines
from support.pool_node import make_pool

OFFER = "0" * 32
EXIT_WITHIN_S = 15.0


class SilentOwner(PoolOwner):
    """Begins every push, and says no more of it."""

    def __init__(self, engine: RunningEngine) -> None:
        self.pool = make_pool(PoolShape(8, 8192), filled=True)
        self.begun = asyncio.Event()
        facts = engine.life.facts
        super().__init__(
            peer_id="owner@1",
            pool=self.pool,
            offers=OfferTable(),
            connectors={"grpc": b""},
            model_fingerprint=facts["model_fingerprint"],
            layout_fingerprints=facts["layout"].split(","),
            on_ended=lambda ended: None,
        )
        self.on_push = self._push

    async def _push(self, order: PushOrder, context: Context) -> None:
        await context.write(progress_to_pb(PushProgress(peer_id=self.peer_id)))
        self.begun.set()
        await asyncio.Event().wait()


async def _told_to_stop(engine: RunningEngine) -> None:
    engine.life.stop()


async def _core_dies(engine: RunningEngine) -> None:
    cores = [
        each
        for each in psutil.Process().children(recursive=True)
        if "pdmesh.engine.core_process" in " ".join(each.cmdline())
    ]
    # Engines that other tests share may run beside it, and were started before.
    max(cores, key=lambda core: core.create_time()).kill()


@pytest.mark.parametrize("ends", [_told_to_stop, _core_dies])
def test_a_server_ends_although_a_writer_never_says_that_it_has_stopped(
    tiny_model: str, ends: Callable[[RunningEngine], Awaitable[None]]
) -> None:
    """Nobody read the core's answer any more for which the server waited, so that it stayed there for ever."""

    async def body() -> None:
        (engine,) = await start_engines(
            tiny_model, "decode", kv_transfer_mode="push", connector=["nixl", "grpc"], drain_timeout_s=0.2
        )
        owner = SilentOwner(engine)
        async with (
            proxy_session(engine.grpc) as session,
            grpc_server("127.0.0.1", 0, MeshSecret(SECRET), lambda server: [owner.add_to(server)]) as port,
        ):
            expectation = Expectation(
                offer_id=OFFER,
                owner_id=owner.peer_id,
                owner_address=f"127.0.0.1:{port}",
                token_ids=[5] * 64,
                cache_salt="",
                remaining_s=60.0,
            )
            await session.data.write(pb.SubmitFrame(expectations=[expectation_to_pb(expectation)]))
            await asyncio.wait_for(owner.begun.wait(), 20)
        owner.pool.close()
        await ends(engine)
        with suppress(InternalError):
            await asyncio.wait_for(engine.task, EXIT_WITHIN_S)

    with loop_thread() as loop:
        loop.run(body())
