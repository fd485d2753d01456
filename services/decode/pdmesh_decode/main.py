"""Life of the decode service."""

from pdmesh.engine.server.preflight import check_engine
from pdmesh.engine.server.service import serve_engine
from pdmesh.lifecycle import Life, run_service
from pdmesh_decode.config import DecodeConfig


async def check(config: DecodeConfig) -> None:
    """Refuse what cannot work before anything is loaded."""
    await check_engine(config, config.role)


async def serve(config: DecodeConfig, life: Life) -> None:
    """Serve as an engine that proxies send tickets, or whole requests, to."""
    await serve_engine(config, life, config.role)


def main(argv: list[str] | None = None) -> int:
    """Load configuration, serve until told to stop, return the exit code."""
    return run_service("decode", DecodeConfig, serve, argv, positional="model", check=check)
