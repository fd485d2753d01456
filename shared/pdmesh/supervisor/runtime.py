"""The runtime folder of one mesh: logs, and the files through which the proxy learns where the engines are."""

import os
import shutil
import tempfile
from collections.abc import Iterable
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
        """Replace the file at once, so that the proxy never reads half of it."""
        target = self.endpoints(role)
        draft = target.with_suffix(".endpoints.new")
        draft.write_text("".join(f"{address}\n" for address in addresses), encoding="utf-8")
        os.replace(draft, target)

    def log_path(self, name: str) -> Path:
        """Log of one child."""
        return self.log_dir / f"{name}.log"

    def rotate_logs(self, names: Iterable[str]) -> None:
        """Move an overlong log aside, keeping one. The children append, so emptying the file is safe."""
        for name in names:
            path = self.log_path(name)
            if path.exists() and path.stat().st_size > MAX_LOG_BYTES:
                shutil.copyfile(path, path.with_suffix(".log.1"))
                os.truncate(path, 0)

    def close(self) -> None:
        """Remove everything but the logs."""
        for role in Role:
            self.endpoints(role).unlink(missing_ok=True)
        shutil.rmtree(self.valkey_dir, ignore_errors=True)
