"""The server's side of its engine core: starts the process, passes messages, notices its death at once, ends it.

Imports no torch. The core is tied to this process by PDEATHSIG, which fires when the *thread* that spawned it dies: enter
the context from the main thread.
"""

import asyncio
import contextlib
import logging
import os
from collections.abc import AsyncIterator, Callable
from types import TracebackType

import msgspec

from pdmesh.config import EngineConfig
from pdmesh.connector.pool import KVPool, PoolShape, create_pool_file
from pdmesh.engine.core_channel import CoreChannel
from pdmesh.engine.launch import Launch, engine_config_json
from pdmesh.engine.messages import CoreFailed, CoreProgress, CoreReady, FromCore, Shutdown, StepOutput, ToCore
from pdmesh.errors import InternalError, from_code
from pdmesh.parent import tied_command

log = logging.getLogger(__name__)

# A model on slow storage takes minutes between two signs of progress; longer than this, it hangs.
SILENCE_TIMEOUT_S = 900.0
# A step may be under way when Shutdown arrives.
SHUTDOWN_GRACE_S = 10.0
# One that says why it cannot start is ending by itself.
LOADING_GRACE_S = 0.2
# What a dead core had sent is on its way through a thread of ZMQ.
LAST_WORDS_S = 0.2


class CoreClient:
    """An async context manager around one core process. `ready` describes it once entered."""

    ready: CoreReady
    pool_fd: int
    """The memfd of the core's KV pool."""

    def __init__(
        self,
        config: EngineConfig,
        *,
        engine_id: str,
        epoch: int,
        on_progress: Callable[[str, float], None],
        offline: bool = False,
    ) -> None:
        """`offline`: see `Launch`."""
        self._config = config
        self._engine_id = engine_id
        self._epoch = epoch
        self._offline = offline
        self._on_progress = on_progress
        self._has_started = False
        self._closing = contextlib.AsyncExitStack()
        self._channel: CoreChannel
        self._process: asyncio.subprocess.Process
        self._death: asyncio.Task[int]

    async def __aenter__(self) -> "CoreClient":
        """Start the core and wait until it is ready. Raises ConfigError or InternalError when it cannot be."""
        async with contextlib.AsyncExitStack() as opening:
            self.pool_fd = create_pool_file(self._engine_id)
            opening.callback(os.close, self.pool_fd)
            self._channel = opening.enter_context(contextlib.closing(CoreChannel()))
            await self._spawn()
            opening.push_async_callback(self._end)
            self.ready = await self._become_ready()
            self._has_started = True
            self._closing = opening.pop_all()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._closing.aclose()

    @property
    def alive(self) -> bool:
        return self._process.returncode is None

    @property
    def pid(self) -> int:
        return self._process.pid

    def send(self, message: ToCore) -> None:
        """Hand a message over; never blocks. To a core that has died it goes nowhere: `died` tells of that."""
        self._channel.send(message)

    async def outputs(self) -> AsyncIterator[FromCore]:
        """Yield the core's messages until it has died and all it said is read. For one reader."""
        while True:
            message = await self._receive()
            if message is None:
                return
            yield self._with_dropped(message)

    async def died(self) -> str:
        """Return when the core has ended, with how it did."""
        code = await asyncio.shield(self._death)
        return f"killed by signal {-code}" if code < 0 else f"exit code {code}"

    def pool(self) -> KVPool:
        """Map the core's KV pool, read-only. The caller closes it."""
        return KVPool(self.pool_fd, PoolShape(self.ready.num_blocks, self.ready.block_bytes), writable=False)

    async def _spawn(self) -> None:
        launch = Launch(
            config_json=engine_config_json(self._config),
            engine_id=self._engine_id,
            epoch=self._epoch,
            pool_fd=self.pool_fd,
            inbox=self._channel.to_core_address,
            outbox=self._channel.from_core_address,
            offline=self._offline,
        )
        # The core inherits it before torch is loaded there: idle threads of torch's teams sleep instead of spinning.
        # Spinning, with other engines on the same two cores, made a decode step 17 times as long (3.3 s, not 0.19 s).
        os.putenv("OMP_WAIT_POLICY", "passive")
        self._process = await asyncio.create_subprocess_exec(
            *tied_command("pdmesh.engine.core_process"),
            stdin=asyncio.subprocess.PIPE,
            pass_fds=[self.pool_fd],
        )
        self._death = asyncio.create_task(self._process.wait())
        self._death.add_done_callback(lambda _: self._channel.wake())
        stdin = self._process.stdin
        assert stdin is not None
        # A core that died at once is noticed below.
        with contextlib.suppress(ConnectionError):
            stdin.write(msgspec.json.encode(launch))
            await stdin.drain()
        stdin.close()

    async def _become_ready(self) -> CoreReady:
        while True:
            try:
                async with asyncio.timeout(SILENCE_TIMEOUT_S):
                    message = await self._receive()
            except TimeoutError:
                raise InternalError(
                    f"the engine core said nothing for {SILENCE_TIMEOUT_S:.0f} s while loading"
                ) from None
            match message:
                case CoreReady():
                    return message
                case CoreProgress():
                    self._on_progress(message.stage, message.fraction)
                case CoreFailed():
                    raise from_code(message.code, message.message)
                case None:
                    raise InternalError(f"the engine core ended while loading: {await self.died()}")

    async def _receive(self) -> FromCore | None:
        """Return the next message; None when the core has died and nothing is left."""
        while True:
            message = self._channel.receive()
            if message is not None:
                return message
            if not self._death.done():
                await self._channel.readable()
                continue
            try:
                async with asyncio.timeout(LAST_WORDS_S):
                    await self._channel.readable()
            except TimeoutError:
                return self._channel.receive()

    def _with_dropped(self, message: FromCore) -> FromCore:
        """Add what this end could not decode to the core's count."""
        num_dropped = self._channel.num_dropped
        if not num_dropped or not isinstance(message, StepOutput) or message.stats is None:
            return message
        total = message.stats.undecodable_messages + num_dropped
        return msgspec.structs.replace(
            message, stats=msgspec.structs.replace(message.stats, undecodable_messages=total)
        )

    async def _end(self) -> None:
        self.send(Shutdown())
        try:
            # A core that still loads reads no messages, and has nothing to finish.
            async with asyncio.timeout(SHUTDOWN_GRACE_S if self._has_started else LOADING_GRACE_S):
                await asyncio.shield(self._death)
        except TimeoutError:
            if self._has_started:
                log.warning("the engine core did not stop within %.0f s and is killed", SHUTDOWN_GRACE_S)
        finally:
            if self.alive:
                self._process.kill()
            await self._death
