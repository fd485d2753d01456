"""Who a peer is: met again, under two names, restarted, lost."""

import asyncio
import contextlib

import pytest

from pdmesh.connector import peers as peers_module
from pdmesh.errors import PeerUnavailable
from pdmesh.protocol.states import TransferState
from pdmesh.protocol.transfers import Ended
from support.kv_owner import DIGEST, Half, directory, owning


@pytest.mark.parametrize("reason", ["peer_lost", "error:it broke"])
def test_what_ends_late_of_a_peer_does_not_cost_it_that_was_met_again(reason: str) -> None:
    """Its pulls over the connection that was made since were cut off for it."""

    async def scenario() -> None:
        half = Half()
        async with owning() as owner, directory(half) as peers:
            before = await peers.reach(owner.address, 2.0)
            peers.forget(before.peer_id, met=before)
            again = await peers.reach(owner.address, 2.0)
            assert again is not before
            assert await peers.end(before.peer_id, "t", False, reason, met=before) is not None
            peers.forget(before.peer_id, met=before)
            assert (peers.knows(again), len(half.detached)) == (True, 1)
            # What began with it since says something of it.
            await peers.end(again.peer_id, "u", False, reason, met=again)
            assert (peers.knows(again), len(half.detached)) == (False, 2)

    asyncio.run(scenario())


def test_a_restarted_owner_replaces_its_predecessor() -> None:
    async def scenario() -> None:
        half = Half()
        async with directory(half) as peers:
            async with owning("owner@1") as owner:
                old = await peers.reach(owner.address, 2.0)
                port = owner.port
            async with owning("owner@2", port=port) as owner:
                owner.offer()
                # gRPC connects to the new process by itself, so the call succeeds: only its answer tells who that is.
                begun = await peers.begin(old, transfer_id="t1", offer_id="o", digest=DIGEST, remaining_s=5.0)
                assert begun.peer_id == "owner@2"
                assert await peers.end("owner@1", "t1", False, "aborted") == Ended(
                    known=True, outcome=TransferState.ABORTED, peer_id="owner@2"
                )
                new = await peers.confirm(old, 2.0)
                assert new.peer_id == "owner@2"
                assert half.detached == ["owner@1"]
                assert not peers.knows(old)
                assert await peers.confirm(new, 2.0) is new
                begun = await peers.begin(new, transfer_id="t2", offer_id="o", digest=DIGEST, remaining_s=5.0)
                assert begun.view is not None
                assert half.detached == ["owner@1"]

    asyncio.run(scenario())


def test_nothing_is_kept_of_peers_that_went() -> None:
    async def scenario() -> None:
        half = Half(refuse={"shm"})
        async with directory(half) as peers:
            for number in range(5):
                async with owning(f"owner-{number}@1") as owner:
                    await peers.reach(owner.address, 2.0)
                    peers.forget(f"owner-{number}@1")
                with pytest.raises(PeerUnavailable):
                    await peers.reach(owner.address, 2.0)
            assert not peers._known
            assert not peers._meeting

    asyncio.run(scenario())


def test_a_process_that_is_met_under_two_names_at_once_is_one_peer() -> None:
    """Each name had a peer of its own under the same id: whichever was lost, the other's pulls went with it."""

    async def scenario() -> None:
        half = Half()
        async with owning() as owner, directory(half) as peers:
            names = (owner.address, f"localhost:{owner.port}")
            first, second = await asyncio.gather(*(peers.reach(name, 2.0) for name in names))
            assert first is second
            assert [name for _, name in half.attached] == ["shm"]
            peers.forget("owner@1")
            assert not peers.knows(first)
            assert half.detached == ["owner@1"]
            assert not len(peers._greeter.turns)

    asyncio.run(scenario())


def test_a_second_name_reveals_a_restart() -> None:
    async def scenario() -> None:
        half = Half()
        async with directory(half) as peers:
            async with owning("owner@1") as owner:
                await peers.reach(owner.address, 2.0)
            async with owning("owner@2") as owner:
                await peers.reach(owner.address, 2.0)
                assert half.detached == ["owner@1"]

    asyncio.run(scenario())


def test_a_peer_that_is_gone_is_dropped_at_the_first_call() -> None:
    async def scenario() -> None:
        half = Half()
        async with directory(half) as peers:
            async with owning() as owner:
                peer = await peers.reach(owner.address, 2.0)
            with pytest.raises(PeerUnavailable):
                await peers.begin(peer, transfer_id="t", offer_id="o", digest=DIGEST, remaining_s=1.0)
            assert half.detached == ["owner@1"]
            assert peers.lost == 1

    asyncio.run(scenario())


def test_dropping_a_peer_cancels_nobody() -> None:
    """A channel that is closed under a call makes grpc raise CancelledError, which ends the wrong task."""

    async def scenario() -> None:
        async with owning() as owner, directory(Half()) as peers:
            owner.offer()
            peer = await peers.reach(owner.address, 2.0)
            begins = [
                asyncio.create_task(
                    peers.begin(peer, transfer_id=f"t{index}", offer_id="o", digest=DIGEST, remaining_s=5.0)
                )
                for index in range(20)
            ]
            await asyncio.sleep(0)
            peers.forget(peer.peer_id)
            outcomes = await asyncio.gather(*begins, return_exceptions=True)
            assert not [each for each in outcomes if isinstance(each, asyncio.CancelledError)]

    asyncio.run(scenario())


class Relay:
    """Passes TCP on to a port, until its connections are cut."""

    def __init__(self, port: int) -> None:
        self.num_connections = 0
        self._port = port
        self._writers: set[asyncio.StreamWriter] = set()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.num_connections += 1
        far_reader, far_writer = await asyncio.open_connection("127.0.0.1", self._port)
        self._writers |= {writer, far_writer}
        await asyncio.gather(self._pass_on(reader, far_writer), self._pass_on(far_reader, writer))

    def cut(self) -> None:
        for writer in self._writers:
            writer.transport.abort()
        self._writers.clear()

    async def _pass_on(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError):
            while piece := await reader.read(1 << 16):
                writer.write(piece)
                await writer.drain()
        writer.close()


def test_an_owner_whose_connection_broke_is_kept_when_it_still_lives(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers_module, "DISCONNECTED_PAUSE_S", 0.05)

    async def scenario() -> None:
        half = Half()
        async with owning("owner@1") as owner, directory(half) as peers:
            relay = Relay(owner.port)
            async with await asyncio.start_server(relay.serve, "127.0.0.1", 0) as server:
                peer = await peers.reach(f"127.0.0.1:{server.sockets[0].getsockname()[1]}", 5)
                relay.cut()
                async with asyncio.timeout(10):
                    while relay.num_connections < 2:
                        await asyncio.sleep(0.02)
                assert await peers.confirm(peer, 5) is peer
                assert half.detached == []
                relay.cut()

    asyncio.run(scenario())


def test_a_peer_that_is_lost_before_the_question_who_it_is_costs_its_successor_nothing() -> None:
    """The question met a closed channel: a traceback in the log, and in a request that had asked."""

    async def scenario() -> None:
        half = Half()
        async with owning("owner@1") as owner, directory(half) as peers:
            peer = await peers.reach(owner.address, 5)
            peers.forget(peer.peer_id)
            await asyncio.sleep(0.1)
            await peers._probe(peer)
            again = await peers.confirm(peer, 5)
            assert again is not peer
            assert again.peer_id == "owner@1"

    asyncio.run(scenario())
