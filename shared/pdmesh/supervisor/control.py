"""How `pdmesh scale` talks to a running `pdmesh up`: an abstract Unix socket, JSON lines, same user only."""

import asyncio
import json
import os
import socket
import struct
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

from pdmesh.errors import ConfigError, Forbidden, InternalError, MeshError, from_code
from pdmesh.supervisor.roles import Role

MAX_REQUEST_BYTES = 4096
REQUEST_TIMEOUT_S = 5.0

Scale = Callable[[dict[Role, int]], Awaitable[list[str]]]


def bind_control(port: int) -> socket.socket:
    """Take the control address of the mesh on `port`: abstract, so SIGKILL frees it. Raises ConfigError when it runs already."""
    bound = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        bound.bind(_address(port))
    except OSError:
        bound.close()
        raise ConfigError(
            f"another `pdmesh up` of yours runs on port {port}; stop it, or choose another --port"
        ) from None
    return bound


@asynccontextmanager
async def control_server(bound: socket.socket, scale: Scale) -> AsyncIterator[None]:
    """Answer `scale` requests on `bound`, which is closed at the end."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            try:
                async with asyncio.timeout(REQUEST_TIMEOUT_S):
                    _check_peer(writer.get_extra_info("socket"))
                    wanted = _wanted(await _read_request(reader))
            except TimeoutError:
                raise ConfigError(f"the request did not come within {REQUEST_TIMEOUT_S:g} s") from None
            reply: dict[str, object] = {"done": await scale(wanted)}
        except MeshError as exc:
            reply = {"error": exc.message, "code": exc.code}
        except Exception as exc:  # the task's top: whoever asks is told, whatever it was
            reply = {"error": f"{type(exc).__name__}: {exc}", "code": InternalError.__name__}
        writer.write(json.dumps(reply).encode() + b"\n")
        writer.close()

    server = await asyncio.start_unix_server(answer, sock=bound, limit=MAX_REQUEST_BYTES)
    try:
        yield
    finally:
        server.close()


def scale(port: int, wanted: dict[Role, int], timeout_s: float) -> list[str]:
    """Ask the mesh on `port` for these numbers of engines; returns what it did. Blocks until it is done.

    Raises ConfigError when no mesh of this user runs there, and what the mesh itself raised.
    """
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.settimeout(timeout_s)
        try:
            connection.connect(_address(port))
        except OSError:
            raise ConfigError(f"no `pdmesh up` of yours runs on port {port}; name its --port") from None
        _check_peer(connection)
        connection.sendall(json.dumps({str(role): count for role, count in wanted.items()}).encode() + b"\n")
        with connection.makefile("rb") as answer:
            line = answer.readline()
    if not line:
        raise ConfigError(f"the `pdmesh up` on port {port} ended before it answered")
    reply = json.loads(line)
    if "error" in reply:
        raise from_code(reply["code"], reply["error"])
    return [str(text) for text in reply["done"]]


def _address(port: int) -> str:
    return f"\0pdmesh-up-{os.getuid()}-{port}"


def _check_peer(connection: socket.socket) -> None:
    """Abstract addresses have no file permissions, so both ends look at who the other is. Raises Forbidden."""
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    _, uid, _ = struct.unpack("3i", credentials)
    if uid not in (0, os.getuid()):
        raise Forbidden(f"the control socket's other end belongs to user {uid}")


async def _read_request(reader: asyncio.StreamReader) -> bytes:
    """Read one line. Raises ConfigError when it is too long."""
    try:
        return await reader.readline()
    except ValueError:
        raise ConfigError(f"the request is longer than {MAX_REQUEST_BYTES} bytes") from None


def _wanted(line: bytes) -> dict[Role, int]:
    """Parse a request. Raises ConfigError for anything but an object of roles and whole numbers."""
    try:
        # Deeply nested lists exhaust the parser's stack.
        message = json.loads(line)
    except (ValueError, RecursionError):
        raise ConfigError("the request is not a line of JSON") from None
    numbers = message.values() if isinstance(message, dict) and set(message) <= set(Role) else [None]
    if any(type(number) is not int for number in numbers):
        raise ConfigError(f"the request must give numbers for some of {', '.join(Role)}")
    return {Role(role): count for role, count in message.items()}
