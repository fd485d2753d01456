"""Puts the OpenAI-compatible API together for the proxy and for an engine's own HTTP port."""

from fastapi import FastAPI, Request
from fastapi.responses import Response
from prometheus_client import CollectorRegistry
from starlette.middleware.cors import CORSMiddleware

import pdmesh
from pdmesh.config import HttpConfig
from pdmesh.errors import InternalError, MeshError
from pdmesh.openai.generator import Generator
from pdmesh.openai.http.disconnect import CLIENT_CLOSED_REQUEST, ClientGone
from pdmesh.openai.http.errors import error_response
from pdmesh.openai.http.middleware import Door
from pdmesh.openai.http.openapi import install_openapi
from pdmesh.openai.http.routes import make_router
from pdmesh.openai.intake.identity import ApiKeys, SaltFunction, narrow_salt
from pdmesh.openai.job import CLIENT_GONE
from pdmesh.openai.metrics import ApiMetrics
from pdmesh.openai.serving import Role, Serving
from pdmesh.openai.text import TextModel


def create_app(
    *,
    generator: Generator,
    text: TextModel,
    config: HttpConfig,
    role: Role,
    registry: CollectorRegistry,
    salt_for: SaltFunction = narrow_salt,
) -> FastAPI:
    """Build the app. `registry` is what /metrics shows; `role` decides whether kv_transfer_params are taken."""
    metrics = ApiMetrics(registry)
    serving = Serving(generator=generator, text=text, config=config, role=role, metrics=metrics, salt_for=salt_for)
    app = FastAPI(title="pdmesh", version=pdmesh.__version__, docs_url=None, redoc_url=None)
    app.include_router(make_router(serving, config, registry))
    app.add_exception_handler(MeshError, _on_mesh_error)

    async def on_client_gone(request: Request, exc: Exception) -> Response:
        """Note a client that left while it sent its body."""
        metrics.outcomes.labels(CLIENT_GONE).inc()
        return Response(status_code=CLIENT_CLOSED_REQUEST)

    app.add_exception_handler(ClientGone, on_client_gone)
    # The last one added is the first a request meets: browsers ask about origins without a key.
    app.add_middleware(Door, keys=ApiKeys(config.api_key), metrics=metrics)
    app.add_middleware(CORSMiddleware, allow_origins=config.allowed_origins, allow_methods=["*"], allow_headers=["*"])
    install_openapi(app)
    return app


async def _on_mesh_error(request: Request, exc: Exception) -> Response:
    return error_response(exc if isinstance(exc, MeshError) else InternalError("unexpected failure"))
