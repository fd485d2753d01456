"""The wires of the fault tests lose, delay, thin out and cut what they are told to, and are whole again afterwards."""

from __future__ import annotations

import socket
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

from faults.wires import Quality, Wires, obstacle, wires

PORT = 7000
SENT = bytes(200_000)
# Answers with the number of bytes it got, as soon as it has heard that no more will come.
SERVER = """
import socket, sys
listening = socket.create_server(("0.0.0.0", int(sys.argv[1])))
print("ready", flush=True)
while True:
    connection, _ = listening.accept()
    with connection:
        num_bytes = 0
        while data := connection.recv(65536):
            num_bytes += len(data)
        connection.sendall(str(num_bytes).encode())
"""


@pytest.fixture(scope="module")
def joined() -> Iterator[Wires]:
    """Two stations; at the other one a server counts bytes."""
    if reason := obstacle():
        pytest.skip(reason)
    with wires(2) as there:
        command = [*there.command(1), sys.executable, "-c", SERVER, str(PORT)]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        yield there
        process.kill()
        process.communicate()


@pytest.fixture(autouse=True)
def whole(joined: Wires) -> Iterator[None]:
    yield
    joined.clear()


def counted(there: Wires, timeout_s: float = 20.0) -> int:
    """Send bytes over; how many arrived. Raises TimeoutError when nothing comes back."""
    with socket.create_connection((there.address(1), PORT), timeout=timeout_s) as connection:
        connection.sendall(SENT)
        connection.shutdown(socket.SHUT_WR)
        return int(connection.recv(100))


def test_a_good_wire_carries_all(joined: Wires) -> None:
    assert counted(joined) == len(SENT)


def test_lost_packets_are_sent_again(joined: Wires) -> None:
    joined.set(0, 1, Quality(drop=0.1))
    assert counted(joined) == len(SENT)


def test_a_delay_is_felt_both_ways(joined: Wires) -> None:
    joined.set(0, 1, Quality(delay_s=0.2))
    began_s = time.monotonic()
    with socket.create_connection((joined.address(1), PORT), timeout=20):
        assert time.monotonic() - began_s >= 0.4


def test_a_thin_wire_takes_as_long_as_its_rate_says(joined: Wires) -> None:
    joined.set(0, 1, Quality(rate_bytes_s=200_000))
    began_s = time.monotonic()
    assert counted(joined) == len(SENT)
    assert time.monotonic() - began_s >= 0.9


def test_a_cut_wire_carries_nothing_until_it_is_mended(joined: Wires) -> None:
    joined.set(0, 1, Quality(cut=True))
    with pytest.raises(TimeoutError):
        counted(joined, timeout_s=0.5)
    joined.clear()
    assert counted(joined) == len(SENT)
