"""Ports of the mesh on this host: which are fixed, which are free."""

import socket

from pdmesh.errors import ConfigError


def require_free(host: str, port: int, what: str) -> None:
    """Raise ConfigError when `port` cannot be bound now."""
    if not _is_free(host, port):
        raise ConfigError(
            f"port {port} on {host} is in use: stop what listens there, or give the {what} another --port"
        )


def prefer(host: str, port: int, taken: set[int]) -> int:
    """Return `port` when it is free and not yet planned for, else one that the kernel picks; the result joins `taken`."""
    chosen = port if port not in taken and _is_free(host, port) else _any_free(host)
    taken.add(chosen)
    return chosen


def _is_free(host: str, port: int) -> bool:
    with _socket(host) as probe:
        try:
            probe.bind((host, port))
            # SO_REUSEADDR lets two sockets bind as long as neither listens, so listening is the real test.
            probe.listen(1)
        except socket.gaierror:
            raise ConfigError(f"host {host!r} is not an address of this machine") from None
        except OSError as exc:
            if exc.errno == 99:
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
