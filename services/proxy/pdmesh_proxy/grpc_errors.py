"""Where gRPC's exceptions become ours."""

import asyncio
import contextlib
from collections.abc import Iterator

import grpc
import grpc.aio

from pdmesh.errors import InternalError, PeerUnavailable, Unauthorized


@contextlib.contextmanager
def translated(address: str) -> Iterator[None]:
    """Turn what calls to the engine at `address` raise into the error tree."""
    try:
        yield
    except grpc.aio.AioRpcError as exc:
        detail = exc.details() or exc.code().name
        if exc.code() is grpc.StatusCode.UNAUTHENTICATED:
            raise Unauthorized(f"engine at {address} refuses this proxy: {detail}") from exc
        raise PeerUnavailable(f"engine at {address} cannot be reached: {detail}") from exc
    except (asyncio.InvalidStateError, grpc.aio.UsageError) as exc:
        raise PeerUnavailable(f"the stream to the engine at {address} has ended") from exc
    except grpc.aio.InternalError as exc:
        raise InternalError(f"gRPC failed towards {address}: {exc}") from exc
