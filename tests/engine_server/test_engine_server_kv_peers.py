"""Which addresses of kv_transfer_params are dialled: those that kv-peers means, and on loopback this user's own engines."""

from __future__ import annotations

import asyncio
import os
import socket
from pathlib import Path
from typing import Any

import pytest

from pdmesh.engine.server import kv_peers
from pdmesh.engine.server.kv_peers import KVPeers, listeners
from pdmesh.errors import Forbidden, PeerUnavailable, TransferFailed

NAMES = {"prefill": ["10.0.0.5", "10.0.0.6"], "a1b2c3": ["10.0.0.6"], "elsewhere": ["192.0.2.9"]}


class Names:
    """Stands where DNS is: what names resolve to, how often it was asked, and how long it takes."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.known = {name: list(addresses) for name, addresses in NAMES.items()}
        self.asked: list[str] = []
        self.delay_s = 0.0
        monkeypatch.setattr(asyncio.base_events.BaseEventLoop, "getaddrinfo", self._getaddrinfo)

    async def _getaddrinfo(self, host: str, port: object, **hints: object) -> list[Any]:
        self.asked.append(host)
        await asyncio.sleep(self.delay_s)
        if host not in self.known:
            raise socket.gaierror(-2, "Name or service not known")
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, 0)) for address in self.known[host]]


@pytest.fixture
def names(monkeypatch: pytest.MonkeyPatch) -> Names:
    return Names(monkeypatch)


def admit(allowed: KVPeers, host: str, port: int = 8101) -> str:
    return asyncio.run(allowed.admit(host, port))


def test_a_name_stands_for_every_address_it_resolves_to(names: Names) -> None:
    async def scenario() -> None:
        peers = KVPeers(["prefill:8101", "10.9.9.9:8101"], on_loopback=False)
        assert await peers.admit("prefill", 8101) == "prefill:8101"
        assert names.asked == []
        assert await peers.admit("10.9.9.9", 8101) == "10.9.9.9:8101"
        assert await peers.admit("10.0.0.5", 8101) == "10.0.0.5:8101"
        # A container tells its host name; what is dialled is the address that was checked.
        assert await peers.admit("a1b2c3", 8101) == "10.0.0.6:8101"
        assert names.asked == ["prefill", "a1b2c3"]
        for host, port in (("10.0.0.7", 8101), ("10.0.0.5", 8102), ("elsewhere", 8101), ("127.0.0.1", 8101)):
            with pytest.raises(Forbidden, match="kv-peers"):
                await peers.admit(host, port)

    asyncio.run(scenario())


def test_replicas_come_and_go_with_their_name(names: Names, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_peers, "FRESH_S", 0.2)
    monkeypatch.setattr(kv_peers, "RETRY_S", 0.05)

    async def scenario() -> None:
        peers = KVPeers(["prefill:8101"], on_loopback=False)
        await peers.admit("10.0.0.5", 8101)
        names.known["prefill"] = ["10.0.0.8"]
        await asyncio.sleep(0.06)
        # An address that is not known is looked up at once, not when the cache is old.
        assert await peers.admit("10.0.0.8", 8101) == "10.0.0.8:8101"
        with pytest.raises(Forbidden):
            await peers.admit("10.0.0.5", 8101)
        # While DNS is away the last answer stands.
        names.known = {}
        await asyncio.sleep(0.25)
        assert await peers.admit("10.0.0.8", 8101) == "10.0.0.8:8101"

    asyncio.run(scenario())


def test_dns_that_does_not_answer_fails_the_fetch_within_its_time(
    names: Names, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kv_peers, "RESOLVE_TIMEOUT_S", 0.05)
    names.delay_s = 30.0

    async def scenario() -> None:
        peers = KVPeers(["prefill:8101"], on_loopback=False)
        with pytest.raises(TransferFailed, match="unresolved"):
            await asyncio.wait_for(peers.admit("10.0.0.5", 8101), 2.0)

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("family", "host"), [(socket.AF_INET, "127.0.0.1"), (socket.AF_INET6, "::"), (socket.AF_INET, "")]
)
def test_a_listener_of_this_user_is_found(family: socket.AddressFamily, host: str) -> None:
    with socket.socket(family) as server:
        server.bind((host, 0))
        port = server.getsockname()[1]
        assert not listeners(port)
        with pytest.raises(PeerUnavailable, match="nothing listens"):
            admit(KVPeers([], on_loopback=True), "127.0.0.1", port)
        server.listen()
        assert listeners(port) == {os.geteuid()}
        assert admit(KVPeers([], on_loopback=True), "127.0.0.1", port) == f"127.0.0.1:{port}"
        with pytest.raises(Forbidden):
            admit(KVPeers([], on_loopback=False), "127.0.0.1", port)


def test_another_users_listener_is_not_sent_the_meshs_proof(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever can listen on a loopback port could have had the credential by naming that port."""
    header = "  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode\n"
    rest = "00000000:0000 {state} 00000000:00000000 00:00000000 00000000 {user:5d} 0 1 1 0 100 0 0 10 0\n"

    def listening(address: str, user: int, state: str = "0A") -> str:
        return f"   0: {address} " + rest.format(state=state, user=user)

    table = tmp_path / "tcp"
    monkeypatch.setattr(kv_peers, "SOCKET_TABLES", (table, tmp_path / "missing"))
    me, other = os.geteuid(), os.geteuid() + 1
    for lines, own in (
        ([listening("0100007F:1FA5", me)], True),
        ([listening("0100007F:1FA5", other)], False),
        ([listening("00000000:1FA5", other)], False),
        ([listening("00000000:1FA5", me), listening("0100007F:1FA5", other)], False),
        # Another port, another interface, a connection: none of them gets what is sent to 127.0.0.1:8101.
        ([listening("0100007F:1FA6", me)], False),
        ([listening("0100007F:1FA5", me), listening("0700000A:1FA5", other)], True),
        ([listening("0100007F:1FA5", me), listening("0100007F:1FA5", other, "01")], True),
        ([listening("0000000000000000FFFF00000100007F:1FA5", other)], False),
        ([listening("00000000000000000000000001000000:1FA5", me)], True),
        ([], False),
    ):
        table.write_text(header + "".join(lines))
        assert (listeners(8101) == {me}) == own, lines
    with pytest.raises(PeerUnavailable, match=r"nothing listens at 127\.0\.0\.1:8101"):
        admit(KVPeers([], on_loopback=True), "127.0.0.1")
    table.write_text(header + listening("0100007F:1FA5", other))
    with pytest.raises(Forbidden, match="does not belong to this engine's user"):
        admit(KVPeers([], on_loopback=True), "127.0.0.1")
    assert admit(KVPeers(["127.0.0.1:8101"], on_loopback=True), "127.0.0.1") == "127.0.0.1:8101"
