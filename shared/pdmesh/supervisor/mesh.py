"""All children of one `pdmesh up`: started side by side, announced to the proxy, scaled, drained in order."""

import asyncio
import contextlib
import socket
import time
from collections.abc import Callable
from dataclasses import replace

from pdmesh.errors import ConfigError, Draining, InternalError, MeshError
from pdmesh.lifecycle import drop_connects, listen
from pdmesh.supervisor.config import MAX_REPLICAS, UpConfig
from pdmesh.supervisor.fallbacks import fallbacks
from pdmesh.supervisor.health import until_healthy
from pdmesh.supervisor.keeper import DRAIN_MARGIN_S, Keeper, KeeperState
from pdmesh.supervisor.pairing import unpaired
from pdmesh.supervisor.plan import LOOPBACK, ChildSpec, Plan
from pdmesh.supervisor.roles import DRAIN_ORDER, ENGINE_ROLES, Role
from pdmesh.supervisor.runtime import RuntimeFolder

# A child that is not ready has no requests to finish.
START_ABORT_GRACE_S = 3.0
# Room on a full disk comes back at any time; a try costs one small file.
ANNOUNCE_RETRY_S = 1.0


class Mesh:
    """Owns every Keeper. `start()` once, then `scale()` at will, `drain()` in the end on every path."""

    def __init__(
        self,
        config: UpConfig,
        plan: Plan,
        runtime: RuntimeFolder,
        *,
        changed: Callable[[], None],
        report: Callable[[str], None],
    ) -> None:
        self.keepers: list[Keeper] = []
        self._config = config
        self._plan = plan
        self._runtime = runtime
        self._shown_changed = changed
        self._report = report
        self._announced: dict[Role, list[str]] = {}
        self._retry: asyncio.TimerHandle | None = None
        self._warned: set[str] = set()
        self._started = False
        self._draining = False
        self._listener: socket.socket | None = None
        """Where clients connect: ours, so that they wait there while a proxy takes the place of another."""
        self._scaling = asyncio.Lock()

    async def start(self) -> None:
        """Start everything at once and return when the proxy can serve.

        Raises ConfigError when a child cannot start as configured, InternalError when one fails again and again or the
        start takes too long. What runs by then is left to `drain()`.
        """
        self._announce()
        for spec in self._plan.children():
            self._add(replace(spec, listener=self._open_door()) if spec.is_door else spec)
        try:
            async with asyncio.timeout(self._config.startup_timeout_s):
                await asyncio.gather(*(keeper.until_ready() for keeper in self.keepers))
                # All engines at once: the first requests then find both kinds.
                self._started = True
                self._announce()
                await until_healthy(self._config.host, self._config.port)
            self._report_doubts()
        except TimeoutError:
            waiting = ", ".join(keeper.spec.name for keeper in self.keepers if keeper.state is not KeeperState.READY)
            raise InternalError(
                f"not ready after {self._config.startup_timeout_s:g} s; waiting for {waiting or 'the proxy'}"
            ) from None

    async def scale(self, wanted: dict[Role, int]) -> list[str]:
        """Bring the number of engines of each role to `wanted`; returns what was done, one line each.

        New engines are announced to the proxy when they are ready; engines to go are withdrawn first, then drained.
        Raises ConfigError for a number that makes no mesh or when a new engine cannot start, Draining at the wrong time.
        """
        self._check_scale(wanted)
        async with self._scaling:
            if self._draining or not self._started:
                raise Draining("scale: the mesh is starting or stopping; try again when it is ready")
            done: list[str] = []
            for role, count in wanted.items():
                present = self._of(role)
                done += await self._grow(role, count - len(present))
                done += await self._shrink(present[count:])
            return done or ["nothing to do"]

    async def drain(self) -> None:
        """Stop everything: the proxy, then the engines, then the tier, each after its requests have ended."""
        self._draining = True
        self._close_door()
        if self._retry is not None:
            self._retry.cancel()
        for roles in DRAIN_ORDER:
            stopping = [keeper.stop(self._grace_s(keeper)) for keeper in self.keepers if keeper.spec.role in roles]
            for result in await asyncio.gather(*stopping, return_exceptions=True):
                # The others must end all the same.
                if isinstance(result, Exception):
                    self._report(f"stopping the {' and '.join(roles)} failed: {type(result).__name__}: {result}")

    def _grace_s(self, keeper: Keeper) -> float:
        return keeper.spec.drain_timeout_s + DRAIN_MARGIN_S if self._started else START_ABORT_GRACE_S

    def kill(self) -> None:
        """End every process at once."""
        for keeper in self.keepers:
            keeper.kill()

    def _add(self, spec: ChildSpec) -> Keeper:
        keeper = Keeper(spec, self._runtime, changed=self._changed, report=self._report)
        self.keepers.append(keeper)
        keeper.start()
        return keeper

    def _open_door(self) -> socket.socket:
        self._listener = listen(self._config.host, self._config.port)
        return self._listener

    def _close_door(self) -> None:
        """Have clients refused, rather than wait for a proxy that will not come."""
        if self._listener is not None:
            # The proxy holds the socket too: it can only answer all who wait there when no more come.
            with contextlib.suppress(OSError):
                drop_connects(self._listener)
            self._listener.close()

    def _changed(self) -> None:
        if any(keeper.state is KeeperState.FAILED for keeper in self._of(Role.PROXY)):
            self._close_door()
        if self._draining:
            self._forsake_engines()
        self._announce()
        self._shown_changed()

    def _forsake_engines(self) -> None:
        """Once every engine has ended or only keeps offers, none of them comes for an offer any more, and they need not wait."""
        engines = [keeper for keeper in self.keepers if keeper.spec.role in ENGINE_ROLES and not keeper.gone]
        children = [keeper.child for keeper in engines]
        if all(child is not None and child.is_keeping for child in children):
            for child in children:
                if child is not None:
                    child.forsake()

    def _announce(self) -> None:
        """Write the engines that are ready to the proxy's files, when they differ from what is written.

        What cannot be written is reported once and tried again until it can; the proxy goes by the old file meanwhile.
        """
        try:
            self._write_changes()
        except OSError as exc:
            if self._retry is None:
                self._report(f"the proxy cannot be told which engines are ready, trying again: {exc}")
            else:
                self._retry.cancel()
            if not self._draining:
                self._retry = asyncio.get_running_loop().call_later(ANNOUNCE_RETRY_S, self._announce)
        else:
            if self._retry is not None:
                self._retry.cancel()
                self._retry = None
                self._report("the proxy knows again which engines are ready")

    def _write_changes(self) -> None:
        for role in ENGINE_ROLES:
            addresses = [
                f"{LOOPBACK}:{keeper.child.facts['grpc_port']}"
                for keeper in self._of(role)
                if self._started and keeper.state is KeeperState.READY and keeper.child is not None
            ]
            if self._announced.get(role) != addresses:
                self._runtime.write_endpoints(role, addresses)
                self._announced[role] = addresses

    def _report_doubts(self) -> None:
        """Say, once, which engines cannot disaggregate or are slow: it works all the same, so nobody would see it."""
        prefills, decodes = (
            {keeper.spec.name: keeper.child.facts for keeper in self._of(role) if keeper.child is not None}
            for role in ENGINE_ROLES
        )
        for line in [*fallbacks({**prefills, **decodes}), *unpaired(prefills, decodes)]:
            if line not in self._warned:
                self._warned.add(line)
                self._report(line)

    def _of(self, role: Role) -> list[Keeper]:
        return [keeper for keeper in self.keepers if keeper.spec.role is role]

    def _check_scale(self, wanted: dict[Role, int]) -> None:
        for role, count in wanted.items():
            lowest = 1 if role is Role.DECODE else 0
            if role not in ENGINE_ROLES or not lowest <= count <= MAX_REPLICAS:
                raise ConfigError(
                    f"scale: {role}={count}: prefill may be 0 to {MAX_REPLICAS}, decode 1 to {MAX_REPLICAS}"
                )

    async def _grow(self, role: Role, count: int) -> list[str]:
        if count <= 0:
            return []
        used = {keeper.spec.name for keeper in self.keepers}
        free = (number for number in range(1, 2 * MAX_REPLICAS + 1) if f"{role}-{number}" not in used)
        began_s = time.monotonic()
        added = [self._add(self._plan.engine(role, next(free))) for _ in range(count)]
        try:
            async with asyncio.timeout(self._config.startup_timeout_s):
                await asyncio.gather(*(keeper.until_ready() for keeper in added))
        except (MeshError, TimeoutError) as exc:
            await self._shrink(added)
            raise exc if isinstance(exc, MeshError) else InternalError(f"{role} was not ready in time") from None
        took_s = time.monotonic() - began_s
        self._report_doubts()
        return [f"{keeper.spec.name} added, ready after {took_s:.1f} s: {keeper.whereabouts}" for keeper in added]

    async def _shrink(self, leaving: list[Keeper]) -> list[str]:
        # Out of the list first: from here on the proxy gives them nothing new.
        self.keepers = [keeper for keeper in self.keepers if keeper not in leaving]
        self._changed()
        await asyncio.gather(*(keeper.stop(self._grace_s(keeper)) for keeper in leaving))
        return [f"{keeper.spec.name} drained and removed" for keeper in leaving]
