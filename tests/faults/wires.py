"""Network namespaces joined by one forwarder in user space that can lose, delay or cut what goes between any two of them.

Where a kernel has netem this is what netem does; here it needs TUN devices and root, nothing else. `Wires` runs this module as a
process of its own, which holds the devices: everything is gone when that process is.
"""

from __future__ import annotations

import fcntl
import heapq
import json
import os
import random
import select
import struct
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path

TUN = Path("/dev/net/tun")
TUNSETIFF = 0x400454CA
IFF_TUN, IFF_NO_PI = 0x0001, 0x1000
MTU_BYTES = 9000
IPV4 = 4
DESTINATION = slice(16, 20)
SOURCE = slice(12, 16)
QUEUE_PACKETS = 20_000
READY = "ready"
ANSWERS_WITHIN_S = 10.0


@dataclass(frozen=True, slots=True)
class Quality:
    """What a link does to packets, either way."""

    drop: float = 0.0
    delay_s: float = 0.0
    cut: bool = False
    """Also for what is under way."""
    rate_bytes_s: float = 0.0
    """0: no limit."""


GOOD = Quality()


class Wires:
    """Stations 0…n-1; station 0 is this process's own namespace."""

    def __init__(self, process: subprocess.Popen[str], prefix: str, subnet: str) -> None:
        self._process = process
        self._prefix = prefix
        self._subnet = subnet

    def address(self, station: int) -> str:
        return _address(self._subnet, station)

    def command(self, station: int) -> tuple[str, ...]:
        """What to put before a command that shall run there."""
        return ("ip", "netns", "exec", f"{self._prefix}{station}") if station else ()

    def device(self, station: int) -> str:
        return f"{self._prefix}{station}"

    def set(self, one: int, other: int, quality: Quality) -> None:
        """Change a link; in force when this returns."""
        self._tell({"between": [one, other]} | asdict(quality))

    def clear(self) -> None:
        """Make every link good again."""
        self._tell({})

    def _tell(self, order: dict[str, object]) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(order) + "\n")
        self._process.stdin.flush()
        _await_line(self._process)


@contextmanager
def wires(num_stations: int) -> Iterator[Wires]:
    """Namespaces, addresses and the forwarder, for as long as the context lasts."""
    prefix, subnet = f"pf{random.randrange(1 << 16):x}s", f"10.{random.randrange(64, 128)}.{random.randrange(256)}"
    names = [f"{prefix}{station}" for station in range(1, num_stations)]
    for name in names:
        _ip("netns", "add", name)
    process = subprocess.Popen(
        [sys.executable, str(Path(__file__).resolve()), prefix, subnet, str(num_stations)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        _await_line(process)
        yield Wires(process, prefix, subnet)
    finally:
        process.kill()
        process.communicate()
        for name in names:
            _ip("netns", "delete", name)


def obstacle() -> str:
    """Why there can be no wires here; empty when there can."""
    if os.geteuid() != 0:
        return "network namespaces and TUN devices need root"
    if not TUN.exists():
        return f"there is no {TUN}"
    done = subprocess.run(["unshare", "--net", "true"], capture_output=True, check=False)
    return "" if done.returncode == 0 else "this process may make no network namespaces"


def _await_line(process: subprocess.Popen[str]) -> None:
    assert process.stdout is not None
    readable, _, _ = select.select([process.stdout], [], [], ANSWERS_WITHIN_S)
    assert readable, "the forwarder does not answer"
    assert process.stdout.readline().strip() == READY, "the forwarder has ended"


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True)


def _address(subnet: str, station: int) -> str:
    return f"{subnet}.{station + 1}"


# ---- the forwarder's own process ---------------------------------------------------------------------


class Forwarder:
    """Takes packets out of one device and puts them into another, or does not."""

    def __init__(self, prefix: str, subnet: str, num_stations: int) -> None:
        self._fds = [_make_device(prefix, subnet, station) for station in range(num_stations)]
        self._stations = {
            bytes(int(part) for part in _address(subnet, station).split(".")): station
            for station in range(num_stations)
        }
        self._links: dict[frozenset[int], Quality] = {}
        self._free_at_s: dict[frozenset[int], float] = {}
        """When a link whose rate is limited may take its next packet."""
        self._late: list[tuple[float, int, frozenset[int], int, bytes]] = []
        self._count = 0
        self._random = random.Random(1)

    def run(self) -> None:
        """Forward until standard input ends."""
        orders = sys.stdin.fileno()
        pending = b""
        while True:
            wait_s = max(0.0, self._late[0][0] - time.monotonic()) if self._late else None
            readable, _, _ = select.select([orders, *self._fds], [], [], wait_s)
            for fd in readable:
                if fd != orders:
                    self._take(os.read(fd, MTU_BYTES + 100))
                    continue
                data = os.read(orders, 65536)
                if not data:
                    return
                *lines, pending = (pending + data).split(b"\n")
                for line in lines:
                    self._obey(json.loads(line))
            self._send_late()

    def _obey(self, order: dict[str, object]) -> None:
        if not order:
            self._links.clear()
            self._free_at_s.clear()
        else:
            between = order.pop("between")
            assert isinstance(between, Sequence)
            self._links[frozenset(between)] = Quality(**order)  # type: ignore[arg-type]
        sys.stdout.write(READY + "\n")
        sys.stdout.flush()

    def _take(self, packet: bytes) -> None:
        to, source = self._stations.get(packet[DESTINATION]), self._stations.get(packet[SOURCE])
        if packet[0] >> 4 != IPV4 or to is None or source is None:
            return
        link = frozenset((to, source))
        quality = self._links.get(link, GOOD)
        if quality.cut or self._random.random() < quality.drop:
            return
        due_s = now_s = time.monotonic()
        if quality.rate_bytes_s:
            due_s = max(now_s, self._free_at_s.get(link, now_s))
            self._free_at_s[link] = due_s + len(packet) / quality.rate_bytes_s
        due_s += quality.delay_s
        if due_s <= now_s:
            self._put(to, packet)
        elif len(self._late) < QUEUE_PACKETS:
            self._count += 1
            heapq.heappush(self._late, (due_s, self._count, link, to, packet))

    def _send_late(self) -> None:
        while self._late and self._late[0][0] <= time.monotonic():
            _, _, link, to, packet = heapq.heappop(self._late)
            if not self._links.get(link, GOOD).cut:
                self._put(to, packet)

    def _put(self, to: int, packet: bytes) -> None:
        # Where its queue is full the packet is lost, as on any wire.
        with suppress(BlockingIOError):
            os.write(self._fds[to], packet)


def _make_device(prefix: str, subnet: str, station: int) -> int:
    """Make a TUN device, move it to its namespace and give it its address; the device lives as long as its descriptor."""
    fd = os.open(TUN, os.O_RDWR | os.O_CLOEXEC | os.O_NONBLOCK)
    name = f"{prefix}{station}"
    fcntl.ioctl(fd, TUNSETIFF, struct.pack("16sH14x", name.encode(), IFF_TUN | IFF_NO_PI))
    there: tuple[str, ...] = ()
    if station:
        _ip("link", "set", name, "netns", name)
        there = ("-n", name)
        _ip(*there, "link", "set", "lo", "up")
    _ip(*there, "address", "add", f"{_address(subnet, station)}/24", "dev", name)
    _ip(*there, "link", "set", name, "mtu", str(MTU_BYTES), "up")
    return fd


def _main() -> None:
    forwarder = Forwarder(sys.argv[1], sys.argv[2], int(sys.argv[3]))
    sys.stdout.write(READY + "\n")
    sys.stdout.flush()
    forwarder.run()


if __name__ == "__main__":
    _main()
