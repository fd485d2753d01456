"""One life of one child process: started so that it cannot outlive us, listened to, and swept up when it ends."""

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

from pdmesh.lifecycle import FORSAKEN_SIGNAL
from pdmesh.parent import NOT_STARTED_CODE, tied_program
from pdmesh.supervisor.plan import ChildSpec

READY_SOCKET_RETRY_S = 0.02
LOG_TAIL_BYTES = 8192


class Child:
    """A process from spawn to its end; made again for each restart."""

    def __init__(self, spec: ChildSpec, log_path: Path, changed: Callable[[], None]) -> None:
        self.spec = spec
        self.pid = 0
        self.stage = "starting"
        self.fraction = 0.0
        self.facts: dict[str, object] = {}
        """What it said with its readiness: http_port, grpc_port, engine_id."""
        self.ready = asyncio.Event()
        self.ready_at_s = 0.0
        self.leaving = asyncio.Event()
        """Set once it takes nothing new and only ends what it has."""
        self.is_keeping = False
        """It was told to end, has nothing left to do, and keeps what others may come for."""
        self._is_forsaken = False
        self.log_error = ""
        """Why its log could not be opened; it then runs without."""
        self._start_error = ""
        self._log_path = log_path
        self._log_start = 0
        self._changed = changed

    async def live(self) -> int:
        """Run the process and return its exit code, negative for a signal, NOT_STARTED_CODE when there was none.

        Whatever it started has ended then too.

        Must be awaited on the main thread: the kernel ties the child's life to the thread that forks it.
        """
        try:
            process, read_end = self._spawn()
        except OSError as exc:
            self._start_error = f"it could not be started: {exc}"
            return NOT_STARTED_CODE
        self.pid = process.pid
        listening = asyncio.create_task(self._listen(read_end))
        try:
            self._changed()
            await _exited(process.pid)
        finally:
            # It is a zombie still, so its group id cannot be anyone else's.
            _kill_group(process.pid)
            process.wait()
            self.pid = 0
            listening.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await listening
        return process.returncode

    def terminate(self) -> None:
        """Ask it to drain; its own children are its business."""
        if self.pid:
            os.kill(self.pid, signal.SIGTERM)

    def forsake(self) -> None:
        """Tell it that nobody comes for what it keeps; only for one that has said that it keeps something."""
        if self.pid and not self._is_forsaken:
            self._is_forsaken = True
            os.kill(self.pid, FORSAKEN_SIGNAL)

    def kill(self) -> None:
        """End it and everything it started."""
        if self.pid:
            _kill_group(self.pid)

    def last_lines(self, count: int) -> list[str]:
        """The end of what this life wrote to its log, or why it had no life."""
        if self._start_error:
            return [self._start_error]
        try:
            with self._log_path.open("rb") as log:
                size = os.fstat(log.fileno()).st_size
                log.seek(max(min(self._log_start, size), size - LOG_TAIL_BYTES))
                text = log.read().decode(errors="replace")
        except OSError:
            return []
        return [line for line in text.splitlines() if line.strip()][-count:]

    def _spawn(self) -> tuple[subprocess.Popen[bytes], int]:
        """Start the process; returns it and the end from which to read what it tells us. Raises OSError."""
        spec = self.spec
        read_end, notify_fd = os.pipe()
        argv, passed = tied_program(*spec.argv), []
        if not spec.ready_socket:
            argv += ["--notify-fd", str(notify_fd)]
            passed.append(notify_fd)
        if spec.listener is not None and spec.listener.fileno() >= 0:
            argv += ["--listen-fd", str(spec.listener.fileno())]
            passed.append(spec.listener.fileno())
        try:
            with self._open_log() as log:
                process = subprocess.Popen(
                    argv,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    env=dict(spec.env),
                    pass_fds=passed,
                    # A group of its own: Ctrl-C is for the supervisor, which drains in order.
                    process_group=0,
                )
        except BaseException:
            os.close(read_end)
            raise
        finally:
            os.close(notify_fd)
        return process, read_end

    def _open_log(self) -> BinaryIO:
        """Open its log to append to; nowhere when the disk does not let us, as running matters more than telling."""
        try:
            log = self._log_path.open("ab")
        except OSError as exc:
            self.log_error = exc.strerror or str(exc)
            return open(os.devnull, "ab")
        self._log_start = log.tell()
        return log

    async def _listen(self, read_end: int) -> None:
        if self.spec.ready_socket:
            os.close(read_end)
            await self._wait_for_socket()
            return
        reader = asyncio.StreamReader()
        transport, _ = await asyncio.get_running_loop().connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(read_end, "rb", buffering=0)
        )
        try:
            while line := await reader.readline():
                self._heard(json.loads(line))
        finally:
            transport.close()

    def _heard(self, message: dict[str, object]) -> None:
        if message.pop("ready", False):
            self._is_ready(message)
        elif message.pop("leaving", False):
            self.leaving.set()
        elif message.pop("keeping", False):
            self.is_keeping = True
            self._changed()
        else:
            self.stage = str(message.get("stage", self.stage))
            fraction = message.get("fraction")
            self.fraction = float(fraction) if isinstance(fraction, int | float) else self.fraction
            self._changed()

    def _is_ready(self, facts: dict[str, object]) -> None:
        self.facts = facts
        self.stage, self.fraction = "ready", 1.0
        self.ready_at_s = time.monotonic()
        self.ready.set()
        self._changed()

    async def _wait_for_socket(self) -> None:
        """Connect until somebody listens; ended by the process's end or the start-up deadline above us."""
        while True:
            try:
                _, writer = await asyncio.open_unix_connection(self.spec.ready_socket)
            except OSError:
                await asyncio.sleep(READY_SOCKET_RETRY_S)
            else:
                writer.close()
                self._is_ready({})
                return


async def _exited(pid: int) -> None:
    """Return when the process has ended, leaving it unreaped."""
    loop = asyncio.get_running_loop()
    done = loop.create_future()
    descriptor = os.pidfd_open(pid)

    def ended() -> None:
        loop.remove_reader(descriptor)
        if not done.done():
            done.set_result(None)

    loop.add_reader(descriptor, ended)
    try:
        await done
    finally:
        loop.remove_reader(descriptor)
        os.close(descriptor)


def _kill_group(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)
