"""Ports of the meshes on this host: which are fixed, which are free, and nobody else's until we end.

A port is held in two ways. An abstract Unix socket of its number keeps other meshes away, of any user; SIGKILL frees it. A
TCP socket that is bound but does not listen keeps other programs away, yet lets our own child bind beside it: both set
SO_REUSEADDR, and only listening is exclusive.
"""

import errno
import socket

from pdmesh.errors import ConfigError


class Ports:
    """Ports held for one mesh until `close()`."""

    def __init__(self) -> None:
        self._held: list[socket.socket] = []

    def require(self, host: str, port: int, option: str) -> None:
        """Hold exactly this port. Raises ConfigError, naming the option that gave it, when it is in use."""
        if not self._hold(host, port):
            raise ConfigError(
                f"port {port} on {host} is in use: stop what listens there, or choose another with {option}"
            )

    def prefer(self, host: str, port: int) -> int:
        """Hold `port` when it is free, else one that the kernel picks; returns it."""
        while not self._hold(host, port):
            port = _any_free(host)
        return port

    def any(self, host: str) -> int:
        """Hold a port that the kernel picks; returns it."""
        return self.prefer(host, _any_free(host))

    def close(self) -> None:
        """Let go of all."""
        for held in self._held:
            held.close()
        self._held.clear()

    def _hold(self, host: str, port: int) -> bool:
        if not _is_free(host, port):
            return False
        among_meshes = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        among_programs = _socket(host)
        try:
            among_meshes.bind(f"\0pdmesh-port-{port}")
            among_programs.bind((host, port))
        except OSError:
            among_meshes.close()
            among_programs.close()
            return False
        self._held += [among_meshes, among_programs]
        return True


def _is_free(host: str, port: int) -> bool:
    with _socket(host) as probe:
        try:
            probe.bind((host, port))
            # SO_REUSEADDR lets two sockets bind as long as neither listens, so listening is the real test.
            probe.listen(1)
        except socket.gaierror:
            raise ConfigError(f"host {host!r} is not an address of this machine") from None
        except OSError as exc:
            if exc.errno == errno.EADDRNOTAVAIL:
                raise ConfigError(f"host {host!r} is not an address of this machine") from None
            return False
        return True


def _any_free(host: str) -> int:
    with _socket(host) as probe:
        probe.bind((host, 0))
        port: int = probe.getsockname()[1]
        return port


def _socket(host: str) -> socket.socket:
    probe = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
    probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    return probe
