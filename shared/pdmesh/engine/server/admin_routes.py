"""Routes of an engine's HTTP port that are about its cache and not about a request; the proxy has none of them."""

import logging

from fastapi import APIRouter, Request

from pdmesh.config import EngineConfig
from pdmesh.engine.server.kv_event_publisher import KVEventPublisher
from pdmesh.engine.server.prefix_cache_reset import PrefixCacheResets
from pdmesh.errors import Forbidden, InvalidRequest

log = logging.getLogger(__name__)

BOOLEANS = {"true": True, "1": True, "false": False, "0": False}
RESET_RUNNING = "reset_running_requests"
RESET_EXTERNAL = "reset_external"


def make_admin_router(config: EngineConfig, resets: PrefixCacheResets, publisher: KVEventPublisher | None) -> APIRouter:
    """Build vLLM's `/reset_prefix_cache` and `/kv_event_sources` over one engine."""
    router = APIRouter()

    @router.post("/reset_prefix_cache")
    async def reset_prefix_cache(request: Request) -> dict[str, bool]:
        # A key, where there are keys, has been checked before the route.
        if not config.api_key and not config.on_loopback:
            raise Forbidden("resetting the prefix cache of an engine that other machines can reach needs --api-key")
        _check_query(request)
        await resets.reset()
        log.info("the prefix cache has been reset")
        return {"success": True}

    @router.get("/kv_event_sources")
    async def kv_event_sources() -> dict[str, dict[str, object]]:
        # By data-parallel rank, of which there is one.
        return {} if publisher is None else {"0": publisher.source()}

    return router


def _check_query(request: Request) -> None:
    """Running requests keep their blocks whatever is said of them; the tier is not this engine's to empty."""
    for name, text in request.query_params.multi_items():
        value = BOOLEANS.get(text.lower())
        if name not in (RESET_RUNNING, RESET_EXTERNAL):
            raise InvalidRequest(
                f"{name[:40]} is no parameter; there are {RESET_RUNNING} and {RESET_EXTERNAL}", param=name[:40]
            )
        if value is None:
            raise InvalidRequest(f"{name} must be true or false, not {text[:40]!r}", param=name)
        if value and name == RESET_EXTERNAL:
            raise InvalidRequest(
                f"{name}: blocks in the kvcache tier belong to all engines and stay; restart the kvcache service",
                param=name,
            )
