"""The life of a service: configuration, logging, an event loop that ends on SIGTERM. What it serves with is in `servers`.

A service's main is `run_service("decode", DecodeConfig, serve, argv, check=check)`. `check(config)` refuses cheaply what
cannot work; with `--check-config` that is all. `serve(config, life)` opens its resources with `async with`, calls
`life.ready()` and waits for `life.stopped()`. Leaving the contexts is the shutdown.
"""

import asyncio
import ctypes
import errno
import json
import logging
import os
import signal
import socket
import struct
import sys
from collections.abc import Awaitable, Callable
from typing import TypeVar

from pdmesh.config import ServiceConfig, load_config, unknown_variables
from pdmesh.errors import ConfigError, MeshError
from pdmesh.logging import setup_logging
from pdmesh.parent import die_with_parent

__all__ = [
    "Life",
    "advertised_host",
    "bind",
    "check_ports",
    "die_with_parent",
    "drop_connects",
    "listen",
    "port_in_use",
    "run_service",
    "unless_stopped_early",
]

log = logging.getLogger(__name__)

HTTP_BACKLOG = 2048
# From a supervisor to a service that is ending: see `Life.forsake`.
FORSAKEN_SIGNAL = signal.SIGUSR1
# gRPC's thread, and those that sum blocks, get Python's lock that soon when the loop is busy (default: 5 ms).
SWITCH_INTERVAL_S = 0.0002
SO_ATTACH_FILTER = 26
# A classic BPF program over a TCP header, (code, jump if true, jump if false, operand): load the flags; SYN? drop; keep.
DROP_SYN = ((0x30, 0, 0, 13), (0x45, 0, 1, 0x02), (0x06, 0, 0, 0), (0x06, 0, 0, 0xFFFFFFFF))

ServiceConfigT = TypeVar("ServiceConfigT", bound=ServiceConfig)


class Life:
    """Tells a service when to stop, and tells whoever started it how far it has come."""

    def __init__(self, notify_fd: int = -1) -> None:
        self._stop = asyncio.Event()
        self._forsaken = asyncio.Event()
        self._notify_fd = notify_fd
        self.exit_error: MeshError | None = None
        self.is_ready = False

    def stop(self, error: MeshError | None = None) -> None:
        """Ask for shutdown; with an error the process ends with a non-zero code and that line."""
        self.exit_error = self.exit_error or error
        self._stop.set()

    @property
    def stopping(self) -> bool:
        return self._stop.is_set()

    async def stopped(self) -> None:
        """Return when the service should end; the only wait without a deadline."""
        await self._stop.wait()

    def forsake(self) -> None:
        """Say that nobody is left who could come for what a service keeps for others while it ends."""
        self._forsaken.set()

    async def forsaken(self) -> None:
        """Return when nobody will come any more; without a supervisor that is never known."""
        await self._forsaken.wait()

    def progress(self, stage: str, fraction: float) -> None:
        """Report a start-up stage (0…1)."""
        self._notify({"stage": stage, "fraction": round(fraction, 3)})

    def ready(self, **facts: object) -> None:
        """Report that the service now takes work."""
        self.is_ready = True
        self._notify({"ready": True, **facts})

    def leaving(self) -> None:
        """Report that new work should go to a successor, which may start now."""
        self._notify({"leaving": True})

    def keeping(self) -> None:
        """Report that this service, which ends, has nothing left to do, and keeps what others may come for."""
        self._notify({"keeping": True})

    def _notify(self, message: dict[str, object]) -> None:
        if self._notify_fd < 0:
            return
        try:
            os.write(self._notify_fd, json.dumps(message).encode() + b"\n")
        except OSError:
            # The supervisor is gone; its death is handled by PDEATHSIG, not here.
            self._notify_fd = -1


def run_service(
    name: str,
    config_class: type[ServiceConfigT],
    serve: Callable[[ServiceConfigT, Life], Awaitable[None]],
    argv: list[str] | None = None,
    positional: str | None = None,
    check: Callable[[ServiceConfigT], Awaitable[None]] | None = None,
) -> int:
    """Run a service until SIGTERM or SIGINT and return its exit code: 0 done, 1 failed, 2 cannot start as configured."""
    prog = f"pdmesh {name}"
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    try:
        config = load_config(config_class, sys.argv[1:] if argv is None else argv, prog=prog, positional=positional)
        setup_logging(name, config.log_level, config.log_format)
        for line in unknown_variables(config_class):
            log.warning("%s", line)
        with asyncio.Runner(loop_factory=_new_event_loop) as runner:
            if not runner.run(_live(config, serve, check)):
                # A thread that still reads a model cannot be interrupted, and Python would wait for it.
                sys.stderr.flush()
                os._exit(0)
    except MeshError as exc:
        return _end_with(prog, exc)
    except BaseExceptionGroup as group:
        error = _only_mesh_errors(group)
        if error is None:
            raise
        return _end_with(prog, error)
    return 0


def _end_with(prog: str, error: MeshError) -> int:
    sys.stderr.write(f"{prog}: {error.message.removeprefix(f'{prog}: ')}\n")
    return 2 if isinstance(error, ConfigError) else 1


def _only_mesh_errors(group: BaseExceptionGroup[BaseException]) -> MeshError | None:
    """The error to tell of when every leaf is one of ours, a ConfigError first; None when something else is among them."""
    leaves: list[MeshError] = []
    for exc in group.exceptions:
        found = _only_mesh_errors(exc) if isinstance(exc, BaseExceptionGroup) else exc
        if not isinstance(found, MeshError):
            return None
        leaves.append(found)
    return next((leaf for leaf in leaves if isinstance(leaf, ConfigError)), leaves[0])


async def _live(
    config: ServiceConfigT,
    serve: Callable[[ServiceConfigT, Life], Awaitable[None]],
    check: Callable[[ServiceConfigT], Awaitable[None]] | None,
) -> bool:
    """Check and serve. False when it was told to stop before it was ready: threads may still be at work."""
    life = Life(config.notify_fd)
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, life.stop)
    loop.add_signal_handler(FORSAKEN_SIGNAL, life.forsake)
    if not await unless_stopped_early(_check_and_serve(config, life, serve, check), life):
        return False
    if life.exit_error is not None:
        raise life.exit_error
    return True


async def _check_and_serve(
    config: ServiceConfigT,
    life: Life,
    serve: Callable[[ServiceConfigT, Life], Awaitable[None]],
    check: Callable[[ServiceConfigT], Awaitable[None]] | None,
) -> None:
    if check is not None:
        await check(config)
    if not config.check_config:
        await serve(config, life)


async def unless_stopped_early(serving: Awaitable[None], life: Life) -> bool:
    """Await `serving`; when `life` is told to stop before it is ready, cancel it, let it clean up and return False."""
    task = asyncio.ensure_future(serving)
    stopped = asyncio.create_task(life.stopped())
    try:
        await asyncio.wait({task, stopped}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done() and not life.is_ready and life.exit_error is None:
            task.cancel()
        await asyncio.wait({task})
    finally:
        task.cancel()
        stopped.cancel()
    if task.cancelled():
        return False
    task.result()
    return True


def _new_event_loop() -> asyncio.AbstractEventLoop:
    try:
        import uvloop
    except ImportError:
        return asyncio.new_event_loop()
    loop: asyncio.AbstractEventLoop = uvloop.new_event_loop()
    return loop


def advertised_host(config: ServiceConfig) -> str:
    """Name under which peers reach this service."""
    if config.advertise_host:
        return config.advertise_host
    return socket.gethostname() if config.host in ("0.0.0.0", "::") else config.host


def check_ports(host: str, **ports: int) -> None:
    """Raise ConfigError when a port cannot be bound, before a service spends minutes on loading a model.

    Each is named as its setting is: `check_ports(host, port=8200, grpc_port=8201)`.
    """
    for setting, port in ports.items():
        bind(host, port, setting).close()


def listen(host: str, port: int) -> socket.socket:
    """Bind a TCP socket for HTTP and listen. Raises ConfigError when the port is taken."""
    bound = bind(host, port, "port")
    # From here on clients can connect; they wait in the backlog until somebody accepts them.
    bound.listen(HTTP_BACKLOG)
    return bound


def drop_connects(listener: socket.socket) -> None:
    """Have the kernel drop what asks for a new connection, and nothing else, whoever shares the socket.

    Raises OSError where it does not do that.
    """
    program = ctypes.create_string_buffer(b"".join(struct.pack("=HBBI", *step) for step in DROP_SYN))
    size, address = len(DROP_SYN), ctypes.addressof(program)
    listener.setsockopt(socket.SOL_SOCKET, SO_ATTACH_FILTER, struct.pack("@HP", size, address))


def bind(host: str, port: int, setting: str) -> socket.socket:
    """Bind a TCP socket. Raises ConfigError that names the setting."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # With the protocol named, asyncio sets TCP_NODELAY on what it accepts; else small answers wait 40 ms for an ACK.
    bound = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        bound.bind((host, port))
    except OSError as exc:
        bound.close()
        if isinstance(exc, socket.gaierror) or exc.errno == errno.EADDRNOTAVAIL:
            raise ConfigError(f"host {host!r} is not an address of this machine") from exc
        if exc.errno == errno.EACCES:
            raise ConfigError(f"port {port} is for the superuser; choose another --{_flag(setting)}") from exc
        raise port_in_use(host, port, setting) from exc
    return bound


def port_in_use(host: str, port: int, setting: str) -> ConfigError:
    """What to raise when something else listens there."""
    return ConfigError(f"port {port} on {host} is in use; stop what listens there or choose another --{_flag(setting)}")


def _flag(setting: str) -> str:
    return setting.replace("_", "-")
