"""Life of the prefill service."""

from pdmesh.engine.server.preflight import check_engine
from pdmesh.engine.server.service import serve_engine
from pdmesh.lifecycle import Life, run_service
from pdmesh_prefill.config import PrefillConfig


async def check(config: PrefillConfig) -> None:
    """Refuse what cannot work before anything is loaded."""
    await check_engine(config, "prefill")


async def serve(config: PrefillConfig, life: Life) -> None:
    """Serve as an engine that proxies send prompts to."""
    await serve_engine(config, life, "prefill")


def main(argv: list[str] | None = None) -> int:
    """Load configuration, serve until told to stop, return the exit code."""
    return run_service("prefill", PrefillConfig, serve, argv, positional="model", check=check)
