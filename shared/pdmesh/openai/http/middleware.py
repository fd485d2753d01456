"""What happens to every HTTP request before and after its route: the API key, request ids, counting."""

import logging
import time

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from pdmesh.errors import InternalError, Unauthorized
from pdmesh.logging import request_id_var
from pdmesh.openai.http.errors import error_response
from pdmesh.openai.http.header_fields import decimal
from pdmesh.openai.intake.identity import ApiKeys, Caller, choose_request_id
from pdmesh.openai.metrics import ApiMetrics

log = logging.getLogger(__name__)

OPEN_PATHS = ("/health", "/ping")
CALLER_KEY = "pdmesh_caller"
REQUEST_ID_HEADER = "x-request-id"
NO_ROUTE = "none"


class Door:
    """ASGI middleware: authenticates, names the request, and counts it when its answer is out."""

    def __init__(self, app: ASGIApp, *, keys: ApiKeys, metrics: ApiMetrics) -> None:
        self._app = app
        self._keys = keys
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        request_id, has_own_id = choose_request_id(headers.get(REQUEST_ID_HEADER, ""))
        token = request_id_var.set(request_id)
        started, status = time.monotonic(), 0

        async def send_named(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                MutableHeaders(scope=message)[REQUEST_ID_HEADER] = request_id
            await send(message)

        try:
            try:
                api_key = "" if scope["path"] in OPEN_PATHS else self._keys.check(headers.get("authorization", ""))
            except Unauthorized as exc:
                await error_response(exc)(scope, receive, send_named)
                return
            scope[CALLER_KEY] = Caller(
                api_key=api_key,
                request_id=request_id,
                has_own_id=has_own_id,
                priority=decimal(headers.get("x-vllm-priority", "")),
            )
            try:
                await self._app(scope, receive, send_named)
            except Exception:
                log.exception("a request failed")
                if status:
                    raise
                # Answered here, inside, so that it is named and counted like every other answer.
                await error_response(InternalError("the server failed on this request; its log says why"))(
                    scope, receive, send_named
                )
        finally:
            request_id_var.reset(token)
            self._count(scope, status, time.monotonic() - started)

    def _count(self, scope: Scope, status: int, duration_s: float) -> None:
        handler = getattr(scope.get("route"), "path", NO_ROUTE)
        method = scope["method"] if handler != NO_ROUTE else "any"
        # No status: the client left before there was one.
        shown = f"{status // 100}xx" if status else "none"
        self._metrics.requests.labels(handler, method, shown).inc()
        self._metrics.duration.labels(handler, method).observe(duration_s)
