"""The runtime folder of one mesh: logs, and the files through which the proxy learns where the engines are."""

import contextlib
import os
import shutil
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path

from pdmesh.errors import ConfigError
from pdmesh.supervisor.roles import Role

MAX_LOG_BYTES = 64 << 20
# Room for the socket's name within the 108 bytes of sockaddr_un.
MAX_VALKEY_DIR_BYTES = 90


class RuntimeFolder:
    """`$XDG_STATE_HOME/pdmesh/run-<port>`, private to this user; `open()` clears what a killed run left there."""

    def __init__(self, path: Path, log_dir: Path) -> None:
        self.path = path
        self.log_dir = log_dir
        self.valkey_dir = path / "valkey"
        """Private working directory of the embedded Valkey."""

    @classmethod
    def open(cls, state_home: str, port: int, log_dir: str) -> "RuntimeFolder":
        """Make the folder. Raises ConfigError when it cannot be written."""
        base = Path(state_home) if state_home else Path.home() / ".local" / "state"
        path = base / "pdmesh" / f"run-{port}"
        folder = cls(path, Path(log_dir) if log_dir else path / "logs")
        try:
            path.mkdir(mode=0o700, parents=True, exist_ok=True)
            for stale in path.glob("*.endpoints*"):
                stale.unlink()
            shutil.rmtree(folder.valkey_dir, ignore_errors=True)
            if len(os.fsencode(folder.valkey_dir)) > MAX_VALKEY_DIR_BYTES:
                folder.valkey_dir = Path(tempfile.mkdtemp(prefix="pdmesh-"))
            folder.log_dir.mkdir(parents=True, exist_ok=True)
        except OSError as exc:
            raise ConfigError(
                f"runtime folder {exc.filename or path} cannot be written: {exc.strerror}; set XDG_STATE_HOME or --log-dir"
            ) from exc
        return folder

    def endpoints(self, role: Role) -> Path:
        """File with one `host:port` per line, read by the proxy."""
        return self.path / f"{role}.endpoints"

    def write_endpoints(self, role: Role, addresses: Iterable[str]) -> None:
        """Replace the file at once, so that the proxy never reads half of it. Raises OSError; the old file then stays."""
        target = self.endpoints(role)
        draft = target.with_suffix(".endpoints.new")
        with _removed_on_failure(draft):
            draft.write_text("".join(f"{address}\n" for address in addresses), encoding="utf-8")
            os.replace(draft, target)

    @property
    def api_key_path(self) -> Path:
        """File with a client's key, for the commands that are shown: terminals are recorded."""
        return self.path / "api-key"

    def write_api_key(self, keys: list[str]) -> None:
        """Keep the first key where only this user can read it. Raises ConfigError."""
        try:
            self.api_key_path.unlink(missing_ok=True)
            if keys:
                with open(os.open(self.api_key_path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
                    file.write(keys[0])
        except OSError as exc:
            raise ConfigError(f"{self.api_key_path} cannot be written: {exc.strerror}; set XDG_STATE_HOME") from exc

    def log_path(self, name: str) -> Path:
        """Log of one child."""
        return self.log_dir / f"{name}.log"

    def rotate_logs(self, names: Iterable[str]) -> list[str]:
        """Move overlong logs aside, keeping one of each; returns what went wrong, one line each.

        The children append, so emptying the file is safe. It is emptied even if there is no room to keep what it held.
        """
        problems = []
        for name in names:
            path = self.log_path(name)
            try:
                if path.exists() and path.stat().st_size > MAX_LOG_BYTES:
                    problems += _keep_copy(path)
                    os.truncate(path, 0)
            except OSError as exc:
                problems.append(f"{path} cannot be kept short: {exc.strerror}")
        return problems

    def close(self) -> None:
        """Remove everything but the logs, as far as the disk lets us."""
        for path in (self.api_key_path, *map(self.endpoints, Role)):
            with contextlib.suppress(OSError):
                path.unlink(missing_ok=True)
        shutil.rmtree(self.valkey_dir, ignore_errors=True)


def _keep_copy(path: Path) -> list[str]:
    """Copy a log aside in place of the one kept before; a line that says why if that fails."""
    draft = path.with_suffix(".log.1.new")
    try:
        with _removed_on_failure(draft):
            shutil.copyfile(path, draft)
            os.replace(draft, path.with_suffix(".log.1"))
    except OSError as exc:
        return [f"{path} is emptied, and what it held is lost: it cannot be copied aside: {exc.strerror}"]
    return []


@contextlib.contextmanager
def _removed_on_failure(draft: Path) -> Iterator[None]:
    """Leave no half-written file behind: on a full disk it would take what little room there is."""
    try:
        yield
    except OSError:
        with contextlib.suppress(OSError):
            draft.unlink(missing_ok=True)
        raise
