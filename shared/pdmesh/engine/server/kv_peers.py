"""Which addresses in kv_transfer_params this engine may dial: they come from clients, and every call carries the mesh's proof.

Off loopback an address must be one of `kv_peers`, as written there or as one that a name there resolves to, so that replicas
behind a headless name may all be fetched from. On loopback any engine of this user on this host will do: a listener of
the same user can read the secret anyway, another user's must not be sent it.
"""

import asyncio
import ipaddress
import logging
import os
import socket
import time
from dataclasses import dataclass
from pathlib import Path

from pdmesh.config import LOOPBACK_HOSTS
from pdmesh.errors import Forbidden, PeerUnavailable, TransferFailed

log = logging.getLogger(__name__)

RESOLVE_TIMEOUT_S = 2.0
# What a name resolved to is believed this long; an address that is not among it is looked up again sooner.
FRESH_S = 5.0
RETRY_S = 0.5
MAX_NAMES = 256
SOCKET_TABLES = (Path("/proc/net/tcp"), Path("/proc/net/tcp6"))
LISTENING = "0A"


@dataclass(frozen=True, slots=True)
class _Answer:
    addresses: frozenset[str]
    at_s: float


class KVPeers:
    """The rule of one engine. Lives on one event loop."""

    def __init__(self, allowed: list[str], *, on_loopback: bool) -> None:
        self._allowed = frozenset(allowed)
        self._on_loopback = on_loopback
        self._answers: dict[str, _Answer] = {}
        self._resolving: dict[str, asyncio.Task[None]] = {}

    async def admit(self, host: str, port: int) -> str:
        """Return the `host:port` to dial.

        Raises Forbidden, TransferFailed when names cannot be resolved now, or PeerUnavailable when the engine there has gone.
        """
        address = join(host, port)
        if address in self._allowed:
            return address
        if self._on_loopback and is_loopback(host):
            users = await asyncio.to_thread(listeners, port)
            if users == {os.geteuid()}:
                return address
            if not users:
                # Not dialled: whoever listens there a moment later may be anybody.
                raise PeerUnavailable(f"nothing listens at {address}")
            raise _forbidden(f"what listens at {address} does not belong to this engine's user")
        names = [name for name, number in map(split, self._allowed) if number == port]
        if names:
            wanted = {host} if _is_literal(host) else await self._addresses(host)
            for max_age_s in (FRESH_S, RETRY_S):
                known = [await self._addresses(name, max_age_s) for name in names]
                if wanted and wanted <= frozenset().union(*known):
                    # The address that was checked, not the name, which may mean another one by the time it is dialled.
                    return join(min(wanted), port)
        raise _forbidden(f"{address} is not a peer of this engine")

    async def _addresses(self, name: str, max_age_s: float = FRESH_S) -> frozenset[str]:
        """What a name resolves to, at most `max_age_s` ago; when that cannot be learned now, what it did before."""
        if _is_literal(name):
            return frozenset((name,))
        answer = self._answers.get(name)
        if answer is None or time.monotonic() - answer.at_s > max_age_s:
            resolving = self._resolving.get(name)
            if resolving is None:
                resolving = self._resolving[name] = asyncio.create_task(self._resolve(name), name="resolve")
                resolving.add_done_callback(lambda task: self._resolving.pop(name, None))
            await asyncio.wait([resolving], timeout=RESOLVE_TIMEOUT_S)
            answer = self._answers.get(name)
        if answer is None:
            raise TransferFailed(f"unresolved: {name} could not be resolved")
        return answer.addresses

    async def _resolve(self, name: str) -> None:
        try:
            found = await asyncio.get_running_loop().getaddrinfo(name, None, type=socket.SOCK_STREAM)
        except OSError as exc:
            log.warning("%s, of kv-peers or kv_transfer_params, cannot be resolved: %s", name, exc)
            return
        self._answers.pop(name, None)
        self._answers[name] = _Answer(frozenset(str(entry[4][0]) for entry in found), time.monotonic())
        if len(self._answers) > MAX_NAMES:
            del self._answers[next(iter(self._answers))]


def listeners(port: int) -> set[int]:
    """User ids of all who listen on this port of the loopback interface."""
    return {user for table in SOCKET_TABLES for user in _listeners(table, port)}


def is_loopback(host: str) -> bool:
    """Whether a host, as clients write it, can only mean this one."""
    return host in LOOPBACK_HOSTS or (_is_literal(host) and ipaddress.ip_address(host).is_loopback)


def join(host: str, port: int) -> str:
    """`host:port`, with brackets where the host has colons."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def split(address: str) -> tuple[str, int]:
    """Take `host:port` apart; port 0 when it has none."""
    host, _, port = address.rpartition(":")
    return host.strip("[]"), int(port) if port.isdigit() else 0


def _listeners(table: Path, port: int) -> list[int]:
    """User ids of the sockets that get connections to this port of the loopback interface."""
    try:
        lines = table.read_text(encoding="ascii").splitlines()[1:]
    except OSError:
        return []
    users = []
    for line in lines:
        fields = line.split()
        local, _, number = fields[1].rpartition(":")
        if fields[3] == LISTENING and int(number, 16) == port and _takes_loopback(local):
            users.append(int(fields[7]))
    return users


def _takes_loopback(words: str) -> bool:
    """Whether a local address, as the kernel prints it (words of 4 bytes in host order), is loopback's or the wildcard."""
    packed = b"".join(int(words[at : at + 8], 16).to_bytes(4, "little") for at in range(0, len(words), 8))
    address = ipaddress.ip_address(packed)
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    address = mapped or address
    return address.is_loopback or address.is_unspecified


def _is_literal(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def _forbidden(problem: str) -> Forbidden:
    return Forbidden(f"{problem}: list it in kv-peers to fetch KV from it", param="kv_transfer_params.remote_host")
