"""The routes of the API. Each reads its body, asks Serving for a job, and answers it whole or as a stream."""

import asyncio
import logging

import msgspec
from fastapi import APIRouter, Request
from fastapi.responses import Response
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest

import pdmesh
from pdmesh.config import HttpConfig
from pdmesh.errors import InternalError, MeshError, NotFound
from pdmesh.openai.generator import ModelCard
from pdmesh.openai.http.body import read_body
from pdmesh.openai.http.disconnect import CLIENT_CLOSED_REQUEST, ClientGone, unless_disconnected
from pdmesh.openai.http.errors import error_response
from pdmesh.openai.http.event_stream import EventStream
from pdmesh.openai.http.middleware import CALLER_KEY
from pdmesh.openai.http.route_header import ROUTE_HEADER, describe_route
from pdmesh.openai.intake.identity import Caller
from pdmesh.openai.intake.sampling import check_token_ids
from pdmesh.openai.job import CANCELLED, CLIENT_GONE, Job
from pdmesh.openai.schemas import ChatBody, CompletionBody, DetokenizeBody, TokenizeBody
from pdmesh.openai.schemas.answers import Detokenized, ModelEntry, ModelList, Rendered, Tokenized, encode
from pdmesh.openai.serving import Serving

log = logging.getLogger(__name__)

# What clients of the API may well ask for.
UNSERVED = ("/v1/embeddings", "/v1/responses")


def make_router(serving: Serving, config: HttpConfig, registry: CollectorRegistry) -> APIRouter:
    """Build all routes over one Serving."""
    router = APIRouter()

    @router.post("/v1/completions")
    async def completions(request: Request) -> Response:
        body, raw = await read_body(request, CompletionBody, config)
        return await _answer(await serving.completion(body, raw, _caller(request)), request, config)

    @router.post("/v1/chat/completions")
    async def chat_completions(request: Request) -> Response:
        body, raw = await read_body(request, ChatBody, config)
        return await _answer(await serving.chat(body, raw, _caller(request)), request, config)

    for path in UNSERVED:
        router.add_api_route(path, _unserved, methods=["POST"], include_in_schema=False)

    @router.get("/v1/models")
    async def models() -> Response:
        card = await serving.generator.card()
        return _json(ModelList(data=[_entry(card, name) for name in (card.name, *card.aliases)]))

    @router.get("/v1/models/{model:path}")
    async def model(model: str) -> Response:
        return _json(_entry(await serving.card_for(model), model))

    @router.post("/v1/completions/render")
    async def render_completion(request: Request) -> Response:
        body, raw = await read_body(request, CompletionBody, config)
        prompts = await serving.render_completion(body, raw)
        return Response(
            encode([await _rendered(serving, request, ids) for ids in prompts]), media_type="application/json"
        )

    @router.post("/v1/chat/completions/render")
    async def render_chat(request: Request) -> Response:
        body, raw = await read_body(request, ChatBody, config)
        return _json(await _rendered(serving, request, await serving.render_chat(body, raw)))

    @router.post("/tokenize")
    async def tokenize(request: Request) -> Response:
        body, _ = await read_body(request, TokenizeBody, config)
        ids, card = await serving.tokenize(body)
        names = [serving.text.vocabulary.token_of(token_id) for token_id in ids] if body.return_token_strs else None
        return _json(Tokenized(count=len(ids), max_model_len=card.max_model_len, tokens=ids, token_strs=names))

    @router.post("/detokenize")
    async def detokenize(request: Request) -> Response:
        body, _ = await read_body(request, DetokenizeBody, config)
        card = await serving.card_for(body.model)
        check_token_ids("tokens", body.tokens, card.vocab_size)
        # In a thread, as a list may be millions long.
        return _json(Detokenized(prompt=await asyncio.to_thread(serving.text.decode, body.tokens, False)))

    @router.get("/health")
    async def health() -> Response:
        if problem := await serving.generator.problem():
            return Response(f"{problem}\n", status_code=503, media_type="text/plain")
        return Response(status_code=200)

    @router.api_route("/ping", methods=["GET", "POST"], include_in_schema=False)
    async def ping() -> Response:
        return await health()

    @router.get("/version")
    async def version() -> dict[str, str]:
        return {"version": pdmesh.__version__}

    @router.get("/load")
    async def load() -> dict[str, int]:
        return {"server_load": serving.metrics.num_in_flight}

    @router.get("/metrics")
    async def metrics() -> Response:
        return Response(generate_latest(registry), media_type=CONTENT_TYPE_LATEST)

    return router


async def _unserved(request: Request) -> Response:
    raise NotFound(f"{request.url.path} is not served: this server has /v1/completions and /v1/chat/completions")


async def _answer(job: Job, request: Request, config: HttpConfig) -> Response:
    """Start a stream, or wait for the whole answer while the client does."""
    if job.answer.body.stream:
        return EventStream(job, keep_alive_s=config.sse_keep_alive_interval_s)
    try:
        whole = await unless_disconnected(request.receive, job.whole())
    except ClientGone:
        job.ended(outcome=CLIENT_GONE)
        return Response(status_code=CLIENT_CLOSED_REQUEST)
    except MeshError as exc:
        job.ended(exc)
        return error_response(exc, {ROUTE_HEADER: describe_route(job.traces)})
    except Exception:
        log.exception("a request failed")
        error = InternalError("the server failed on this request; its log says why")
        job.ended(error)
        return error_response(error, {ROUTE_HEADER: describe_route(job.traces)})
    else:
        job.ended()
        return _json(whole, {ROUTE_HEADER: describe_route(job.traces)})
    finally:
        # Reached with the job still open only when this task is cancelled at shutdown.
        job.ended(outcome=CANCELLED)


async def _rendered(serving: Serving, request: Request, token_ids: list[int]) -> Rendered:
    card = await serving.generator.card()
    return Rendered(request_id=_caller(request).request_id, model=card.name, token_ids=token_ids)


def _json(value: msgspec.Struct, headers: dict[str, str] | None = None) -> Response:
    return Response(encode(value), headers=headers, media_type="application/json")


def _caller(request: Request) -> Caller:
    caller: Caller = request.scope[CALLER_KEY]
    return caller


def _entry(card: ModelCard, name: str) -> ModelEntry:
    return ModelEntry(id=name, created=card.created_s, root=card.root, max_model_len=card.max_model_len)
