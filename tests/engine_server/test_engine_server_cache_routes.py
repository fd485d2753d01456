"""The routes of an engine that are about its cache, and what reaches the publisher."""

from __future__ import annotations

import asyncio

import httpx
import pytest
from fastapi import FastAPI
from prometheus_client import CollectorRegistry

from pdmesh.config import EngineConfig
from pdmesh.engine.kv_events_config import KVEventsConfig
from pdmesh.engine.messages import PrefixCacheReset, ResetPrefixCache, ToCore
from pdmesh.engine.server.admin_routes import make_admin_router
from pdmesh.engine.server.kv_event_publisher import KVEventPublisher
from pdmesh.engine.server.prefix_cache_reset import PrefixCacheResets
from pdmesh.models.source import DEMO_MODEL
from pdmesh.openai.app import create_app
from pdmesh.openai.text import TextModel, load_text_model
from support.echo_generator import EchoGenerator

KEY = {"Authorization": "Bearer key"}


@pytest.fixture(scope="module")
def text() -> TextModel:
    return load_text_model(DEMO_MODEL)


class AnsweringCore:
    """Resets at once."""

    def __init__(self) -> None:
        self.num_resets = 0
        self.resets = PrefixCacheResets(self)

    def send(self, message: ToCore) -> None:
        assert isinstance(message, ResetPrefixCache)
        self.num_resets += 1
        asyncio.get_running_loop().call_soon(self.resets.done, PrefixCacheReset(number=message.number))


def engine_app(
    text: TextModel, core: AnsweringCore, config: EngineConfig, publisher: KVEventPublisher | None = None
) -> FastAPI:
    app = create_app(generator=EchoGenerator(), text=text, config=config, role="engine", registry=CollectorRegistry())
    app.include_router(make_admin_router(config, core.resets, publisher))
    return app


async def call(app: FastAPI, method: str, path: str, headers: dict[str, str] | None = None) -> httpx.Response:
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app=app), base_url="http://engine") as client:
        return await client.request(method, path, headers=headers)


def reset(
    text: TextModel, config: EngineConfig, query: str = "", headers: dict[str, str] | None = None
) -> tuple[int, httpx.Response]:
    async def scenario() -> tuple[int, httpx.Response]:
        core = AnsweringCore()
        answer = await call(engine_app(text, core, config), "POST", f"/reset_prefix_cache{query}", headers)
        return core.num_resets, answer

    return asyncio.run(scenario())


@pytest.mark.parametrize(
    "query", ["", "?reset_running_requests=true", "?reset_running_requests=0&reset_external=False"]
)
def test_a_reset_answers_as_vllm_does(text: TextModel, query: str) -> None:
    num_resets, answer = reset(text, EngineConfig(), query)
    assert (answer.status_code, answer.json()) == (200, {"success": True})
    assert num_resets == 1


@pytest.mark.parametrize(
    ("query", "param"),
    [
        ("?reset_external=true", "reset_external"),
        ("?reset_running_requests=maybe", "reset_running_requests"),
        ("?reset_all=true", "reset_all"),
    ],
)
def test_what_a_reset_cannot_do_is_refused(text: TextModel, query: str, param: str) -> None:
    num_resets, answer = reset(text, EngineConfig(), query)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == param
    assert num_resets == 0


def test_a_reset_needs_a_key_where_there_are_keys_or_others_can_connect(text: TextModel) -> None:
    keyed, opened = EngineConfig(api_key=["key"]), EngineConfig(host="0.0.0.0", secret="s" * 16)
    assert reset(text, keyed)[1].status_code == 401
    assert reset(text, keyed, headers=KEY)[1].status_code == 200
    num_resets, answer = reset(text, opened)
    assert (num_resets, answer.status_code) == (0, 403)
    assert "--api-key" in answer.json()["error"]["message"]
    both = EngineConfig(host="0.0.0.0", secret="s" * 16, api_key=["key"])
    assert reset(text, both, headers=KEY)[1].status_code == 200


def test_sources_are_told_by_rank(text: TextModel) -> None:
    async def scenario() -> None:
        core, config = AnsweringCore(), EngineConfig()
        assert (await call(engine_app(text, core, config), "GET", "/kv_event_sources")).json() == {}
        settings = KVEventsConfig(enable_kv_cache_events=True, endpoint="tcp://*:0", topic="kv")
        async with KVEventPublisher(settings, host="127.0.0.1") as publisher:
            answer = await call(engine_app(text, core, config, publisher), "GET", "/kv_event_sources")
            assert answer.json()["0"]["endpoint"] == publisher.endpoint
            assert answer.json()["0"]["topic"] == "kv"

    asyncio.run(scenario())


def test_the_proxy_has_no_reset(text: TextModel) -> None:
    async def scenario() -> None:
        app = create_app(
            generator=EchoGenerator(), text=text, config=EngineConfig(), role="proxy", registry=CollectorRegistry()
        )
        assert (await call(app, "POST", "/reset_prefix_cache")).status_code == 404

    asyncio.run(scenario())
