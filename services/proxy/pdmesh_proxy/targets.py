"""What an operator may name as the place of engines: `host:port`, or a file that lists such lines."""

import ipaddress
from dataclasses import dataclass
from pathlib import Path

FILE_PREFIX = "file:"


@dataclass(frozen=True, slots=True)
class HostTarget:
    """A host, whose every address is an engine."""

    host: str
    port: int

    @property
    def is_literal(self) -> bool:
        """Whether the host is an IP address, so that no look-up can change it."""
        try:
            ipaddress.ip_address(self.host)
        except ValueError:
            return False
        return True


@dataclass(frozen=True, slots=True)
class FileTarget:
    """A file with one `host:port` per line; empty lines and `#` comments are skipped."""

    path: Path


def parse_target(text: str) -> HostTarget | FileTarget:
    """Read one target. Raises ValueError naming it and the two forms."""
    if text.startswith(FILE_PREFIX):
        return FileTarget(Path(text.removeprefix(FILE_PREFIX)))
    return parse_host_port(text)


def parse_host_port(text: str) -> HostTarget:
    """Read `host:port` or `[ipv6]:port`. Raises ValueError."""
    host, colon, port = text.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not colon or not host or not port.isascii() or not port.isdigit() or not 0 < int(port) < 65536:
        raise ValueError(f"target {text!r} is neither host:port nor file:PATH")
    return HostTarget(host, int(port))


def join_host_port(host: str, port: int) -> str:
    """Write an address as gRPC takes it."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
