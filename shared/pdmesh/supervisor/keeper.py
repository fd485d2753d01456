"""Keeps one child alive: restarts it with backoff when it crashes, and knows when that is pointless."""

import asyncio
import contextlib
import time
from collections.abc import Callable
from enum import StrEnum

from pdmesh.errors import ConfigError, InternalError, MeshError
from pdmesh.parent import NOT_STARTED_CODE
from pdmesh.supervisor.child import Child
from pdmesh.supervisor.plan import ChildSpec
from pdmesh.supervisor.runtime import RuntimeFolder

FIRST_BACKOFF_S = 0.5
MAX_BACKOFF_S = 30.0
HEALTHY_AFTER_S = 60.0
# Above the services' own drain, so that they end by themselves and can say what they aborted.
DRAIN_MARGIN_S = 5.0
# A first start that fails this often is not going to work; a config error is taken at its word at once.
MAX_FIRST_STARTS = 3
# After it has worked before, a config error may be passing: a port not yet free, a file being replaced.
MAX_CONFIG_ERRORS = 5
CONFIG_ERROR_CODE = 2
REPORTED_LINES = 5
PORT_FACTS = {"http": "http_port", "grpc": "grpc_port"}
"""How ports are called when shown -> as services report them."""


class KeeperState(StrEnum):
    STARTING = "starting"
    READY = "ready"
    WAITING = "restarting"
    STOPPING = "draining"
    STOPPED = "stopped"
    FAILED = "failed"


class Keeper:
    """Owns the lives of one child. `run()` is its task; `changed` is called on every change, `report` with news."""

    def __init__(
        self,
        spec: ChildSpec,
        runtime: RuntimeFolder,
        *,
        changed: Callable[[], None],
        report: Callable[[str], None],
    ) -> None:
        self.spec = spec
        self.restarts = 0
        self.gone = False
        """Whether `run()` has ended."""
        # Done when it was ready once; holds the error when it never will be.
        self._first_ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._log_path = runtime.log_path(spec.name)
        self._changed = changed
        self._report = report
        self._child: Child | None = None
        # Past lives that end what they have, while the present one takes what is new.
        self._leaving: dict[Child, asyncio.Task[None]] = {}
        self._log_error = ""
        self._stop = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    @property
    def child(self) -> Child | None:
        """The present life, if there is one."""
        return self._child if self._child is not None and self._child.pid else None

    @property
    def state(self) -> KeeperState:
        """Where it stands now."""
        if self.gone:
            return KeeperState.STOPPED if self._stop.is_set() else KeeperState.FAILED
        if self._stop.is_set():
            return KeeperState.STOPPING
        if self.child is None:
            return KeeperState.WAITING if self.restarts else KeeperState.STARTING
        return KeeperState.READY if self.child.ready.is_set() else KeeperState.STARTING

    @property
    def log_path(self) -> str:
        return str(self._log_path)

    @property
    def whereabouts(self) -> str:
        """Process, ports and log of the present life."""
        child = self.child
        if child is None:
            return f"log {self.log_path}"
        ports = [f"{kind} {child.facts[fact]}" for kind, fact in PORT_FACTS.items() if fact in child.facts]
        return ", ".join([f"pid {child.pid}", *ports, f"log {self.log_path}"])

    def start(self) -> None:
        """Begin its first life; the log of an earlier `up` is emptied."""
        # A log that cannot be written is reported with the first life.
        with contextlib.suppress(OSError):
            self._log_path.write_bytes(b"")
        self._task = asyncio.create_task(self._run(), name=self.spec.name)

    async def until_ready(self) -> None:
        """Return when it has been ready once. Raises ConfigError or InternalError when it never will be."""
        # Shielded: whoever waits may be cancelled, the fact stays.
        await asyncio.shield(self._first_ready)

    async def stop(self, grace_s: float) -> None:
        """SIGTERM, then SIGKILL after `grace_s`; returns when nothing of it is left."""
        self._stop.set()
        if self._task is None:
            return
        if self.child is not None:
            self.child.terminate()
            self._changed()
        done, _ = await asyncio.wait([self._task], timeout=grace_s)
        if not done:
            self._report(f"{self.spec.name} did not end in {grace_s:.0f} s and is killed")
            self.kill()
        # It ends its child on every way out, so that it failed changes nothing for those that are stopped next.
        await asyncio.wait([self._task])

    def kill(self) -> None:
        """End it at once, and do not start it again."""
        self._stop.set()
        for child in (self.child, *self._leaving):
            if child is not None:
                child.kill()

    async def _run(self) -> None:
        try:
            while not self._stop.is_set():
                try:
                    await self._live_on()
                    break
                except Exception as exc:  # the task's top: our fault is no reason to give up on the child
                    self._report(
                        f"{self.spec.name} is started anew, as watching it failed: {type(exc).__name__}: {exc}"
                    )
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._stop.wait(), MAX_BACKOFF_S)
            if self._leaving:
                await asyncio.wait(self._leaving.values())
        finally:
            self.gone = True
            if not self._first_ready.done():
                self._first_ready.set_exception(InternalError(f"{self.spec.name} was stopped before it was ready"))
            # Nobody may be waiting for it any more.
            self._first_ready.exception()
            self._changed()

    async def _live_on(self) -> None:
        backoff_s = FIRST_BACKOFF_S
        config_errors = 0
        while not self._stop.is_set():
            child = self._child = Child(self.spec, self._log_path, self._child_changed)
            code = await self._life_of(child)
            if self._stop.is_set():
                return
            self.restarts += 1
            if code is None:
                self._report(f"{self.spec.name} takes nothing new and ends what it has; its successor is started")
                continue
            config_errors = config_errors + 1 if code == CONFIG_ERROR_CODE else 0
            error = self._hopeless(child, code, config_errors)
            if error is not None:
                self._give_up(error)
                return
            if child.ready.is_set() and time.monotonic() - child.ready_at_s >= HEALTHY_AFTER_S:
                backoff_s = FIRST_BACKOFF_S
            self._report(_obituary(child, code, f"restarted in {backoff_s:g} s"))
            self._changed()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._stop.wait(), backoff_s)
            backoff_s = min(backoff_s * 2, MAX_BACKOFF_S)

    async def _life_of(self, child: Child) -> int | None:
        """Its exit code; None when a successor may start before it has ended."""
        living = asyncio.create_task(self._unless_stopped(child), name=self.spec.name)
        leaving = asyncio.create_task(child.leaving.wait())
        try:
            await asyncio.wait({living, leaving}, return_when=asyncio.FIRST_COMPLETED)
            if living.done() or self._stop.is_set() or self.spec.listener is None:
                return await living
        except asyncio.CancelledError:
            living.cancel()
            await asyncio.wait({living})
            raise
        finally:
            leaving.cancel()
        self._leaving[child] = asyncio.create_task(self._see_off(child, living))
        return None

    async def _unless_stopped(self, child: Child) -> int:
        """Who stops us before the task's first turn finds no process to tell, so that none may start then."""
        return NOT_STARTED_CODE if self._stop.is_set() else await child.live()

    async def _see_off(self, child: Child, living: asyncio.Task[int]) -> None:
        """Wait until a child has ended what it has; it is killed when that takes longer than it may."""
        try:
            done, _ = await asyncio.wait({living}, timeout=self.spec.drain_timeout_s + DRAIN_MARGIN_S)
            if not done:
                self._report(f"{self.spec.name} did not end in {self.spec.drain_timeout_s:.0f} s and is killed")
                child.kill()
            if code := await living:
                self._report(_obituary(child, code, "its successor serves"))
        finally:
            living.cancel()
            del self._leaving[child]

    def _child_changed(self) -> None:
        if self._child is not None and self._child.log_error != self._log_error:
            self._log_error = self._child.log_error
            if self._log_error:
                self._report(f"{self.spec.name} runs without its log {self._log_path}: {self._log_error}")
        if self._child is not None and self._child.ready.is_set() and not self._first_ready.done():
            self._first_ready.set_result(None)
        self._changed()

    def _hopeless(self, child: Child, code: int, config_errors: int) -> MeshError | None:
        """The error that ends the restarts, or None."""
        last = (child.last_lines(1) or ["it wrote nothing to its log"])[0]
        worked_before = self._first_ready.done()
        if code == CONFIG_ERROR_CODE and (not worked_before or config_errors >= MAX_CONFIG_ERRORS):
            return ConfigError(f"{self.spec.name}: {last.removeprefix(f'pdmesh {self.spec.role}: ')}")
        if not worked_before and self.restarts >= MAX_FIRST_STARTS:
            return InternalError(
                f"{self.spec.name} failed {self.restarts} times at start ({_cause(code)}): {last}; see {self._log_path}"
            )
        return None

    def _give_up(self, error: MeshError) -> None:
        if self._first_ready.done():
            self._report(f"{error.message}; it is not restarted any more")
        else:
            self._first_ready.set_exception(error)


def _obituary(child: Child, code: int, what_next: str) -> str:
    lines = [f"{child.spec.name} ended ({_cause(code)}), {what_next}; its last log lines:"]
    return "\n".join(lines + [f"    {line}" for line in child.last_lines(REPORTED_LINES)])


def _cause(code: int) -> str:
    return f"exit code {code}" if code >= 0 else f"signal {-code}"
