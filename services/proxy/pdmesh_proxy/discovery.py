"""Where the engines are: turns targets into addresses and looks again every few seconds, so that replicas join and leave.

At rest, when no request comes and nothing is amiss, it looks more seldom; the first request then has it look at once.
"""

import asyncio
import contextlib
import logging
import socket
from collections.abc import Callable
from enum import StrEnum

from pdmesh_proxy.targets import FileTarget, HostTarget, join_host_port, parse_host_port, parse_target

log = logging.getLogger(__name__)

# A resolver that does not answer must not keep the other targets from being looked at.
RESOLVE_TIMEOUT_S = 5.0


class Listed(StrEnum):
    """The list of targets an address was found through."""

    PREFILL = "prefill"
    DECODE = "decode"


Addresses = dict[str, frozenset[Listed]]
"""gRPC `host:port` -> the lists that name it."""


class Discovery:
    """Calls `on_addresses` with all addresses whenever they differ from the last time."""

    def __init__(
        self,
        targets: dict[Listed, list[str]],
        *,
        interval_s: float,
        rest_interval_s: float,
        on_addresses: Callable[[Addresses], None],
        is_settled: Callable[[], bool],
    ) -> None:
        """`is_settled` says whether every address that was found is in use; only then there is any rest."""
        self._targets = [(listed, parse_target(text)) for listed, texts in targets.items() for text in texts]
        self._interval_s = interval_s
        self._rest_interval_s = rest_interval_s
        self._on_addresses = on_addresses
        self._is_settled = is_settled
        self._hurry = asyncio.Event()
        self._known: dict[HostTarget | FileTarget, frozenset[str]] = {}
        """Last good answer per target: a look-up that fails takes no engine away."""
        self._complained: set[HostTarget | FileTarget] = set()
        self._last: Addresses | None = None
        self._seen: set[Listed] = set()

    @property
    def wanted(self) -> frozenset[Listed]:
        """Kinds of engine that the mesh is meant to have: those of a configured host, and of a file that named one."""
        hosts = {listed for listed, target in self._targets if isinstance(target, HostTarget)}
        return frozenset(hosts | self._seen)

    def hurry(self) -> None:
        """Someone depends on where the engines are: keep looking, and at once after a rest."""
        self._hurry.set()

    async def run(self) -> None:
        """Look, report, wait; ends at once when no target can ever change."""
        await self.look()
        while any(isinstance(target, FileTarget) or not target.is_literal for _, target in self._targets):
            await asyncio.sleep(self._interval_s)
            if self._is_settled():
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(self._rest_interval_s - self._interval_s):
                        await self._hurry.wait()
            self._hurry.clear()
            await self.look()

    async def look(self) -> None:
        """Resolve every target once and report a change."""
        found: dict[str, frozenset[Listed]] = {}
        for listed, target in self._targets:
            for address in await self._addresses(target):
                found[address] = found.get(address, frozenset()) | {listed}
                self._seen.add(listed)
        if found != self._last:
            self._last = found
            self._on_addresses(found)

    async def _addresses(self, target: HostTarget | FileTarget) -> frozenset[str]:
        try:
            if isinstance(target, HostTarget):
                self._known[target] = await _resolve(target)
            else:
                self._known[target] = frozenset().union(*[await _resolve(line) for line in _read(target)])
        except (OSError, ValueError, TimeoutError) as exc:
            if target not in self._complained:
                self._complained.add(target)
                log.warning("cannot look up %s, keeping what was known: %s", target, exc)
        else:
            self._complained.discard(target)
        return self._known.get(target, frozenset())


def _read(target: FileTarget) -> list[HostTarget]:
    """Parse the file. It is small and local, so reading it does not leave the event loop."""
    lines = (line.partition("#")[0].strip() for line in target.path.read_text(encoding="utf-8").splitlines())
    return [parse_host_port(line) for line in lines if line]


async def _resolve(target: HostTarget) -> frozenset[str]:
    """Return every IPv4 address of a host, or, when it has none, every IPv6 address."""
    if target.is_literal:
        return frozenset({join_host_port(target.host, target.port)})
    loop = asyncio.get_running_loop()
    async with asyncio.timeout(RESOLVE_TIMEOUT_S):
        try:
            found = await loop.getaddrinfo(target.host, None, family=socket.AF_INET, type=socket.SOCK_STREAM)
        except socket.gaierror:
            found = await loop.getaddrinfo(target.host, None, family=socket.AF_INET6, type=socket.SOCK_STREAM)
    return frozenset(join_host_port(str(sockaddr[0]), target.port) for *_, sockaddr in found)
