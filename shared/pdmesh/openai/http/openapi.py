"""The OpenAPI document. Routes read their bodies themselves (bounded, fast), so the schemas are added here."""

from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi

import pdmesh
from pdmesh.openai.schemas import ChatBody, CompletionBody, DetokenizeBody, RequestBody, TokenizeBody

BODIES: dict[str, type[RequestBody]] = {
    "/v1/completions": CompletionBody,
    "/v1/chat/completions": ChatBody,
    "/v1/completions/render": CompletionBody,
    "/v1/chat/completions/render": ChatBody,
    "/tokenize": TokenizeBody,
    "/detokenize": DetokenizeBody,
}
REF = "#/components/schemas/{model}"


def install_openapi(app: FastAPI) -> None:
    """Make `/openapi.json` describe the bodies."""

    def document() -> dict[str, Any]:
        if app.openapi_schema is None:
            made = get_openapi(title="pdmesh", version=pdmesh.__version__, routes=app.routes)
            schemas = made.setdefault("components", {}).setdefault("schemas", {})
            for path, body in BODIES.items():
                schema = body.model_json_schema(ref_template=REF)
                schemas.update(schema.pop("$defs", {}))
                schemas[body.__name__] = schema
                content = {"application/json": {"schema": {"$ref": REF.format(model=body.__name__)}}}
                made["paths"][path]["post"]["requestBody"] = {"required": True, "content": content}
            app.openapi_schema = made
        return app.openapi_schema

    app.openapi = document  # type: ignore[method-assign]
