"""The API on a real socket, in a thread of its own, so that synchronous clients can be used."""

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx
from fastapi import FastAPI
from prometheus_client import CollectorRegistry

from openai import OpenAI
from pdmesh.config import HttpConfig
from pdmesh.openai.app import create_app
from pdmesh.openai.generator import Generator
from pdmesh.openai.serving import Role
from pdmesh.openai.text import TextModel
from pdmesh.servers import http_server
from support.echo_generator import EchoGenerator


class ApiServer:
    """Where it listens, what is behind it, and ways to call it."""

    def __init__(self, url: str, generator: EchoGenerator) -> None:
        self.url = url
        self.generator = generator
        self._http = self.http()

    def http(self) -> httpx.Client:
        # Loading the certificate store, which nothing here needs, takes longer than most tests.
        return httpx.Client(base_url=self.url, timeout=20, verify=False)

    def client(self, api_key: str = "none") -> OpenAI:
        return OpenAI(base_url=f"{self.url}/v1", api_key=api_key, max_retries=0, http_client=self.http())

    def raw(self, method: str, path: str, **options: Any) -> httpx.Response:
        return self._http.request(method, path, **options)

    def post(self, path: str, body: object, headers: dict[str, str] | None = None) -> httpx.Response:
        return self._http.post(path, json=body, headers=headers)

    def close(self) -> None:
        self._http.close()


@contextmanager
def api_server(
    text: TextModel,
    generator: EchoGenerator | None = None,
    *,
    role: Role = "proxy",
    config: HttpConfig | None = None,
) -> Iterator[ApiServer]:
    """Serve until the block ends."""
    behind = generator or EchoGenerator()
    app = make_app(text, behind, role=role, config=config)
    with serve_in_thread(app) as url:
        server = ApiServer(url, behind)
        try:
            yield server
        finally:
            server.close()


def make_app(
    text: TextModel, generator: Generator, *, role: Role = "proxy", config: HttpConfig | None = None
) -> FastAPI:
    return create_app(
        generator=generator, text=text, config=config or HttpConfig(), role=role, registry=CollectorRegistry()
    )


@contextmanager
def serve_in_thread(app: FastAPI) -> Iterator[str]:
    """Run the app on a free port of the loopback interface; yields its URL."""
    loop = asyncio.new_event_loop()
    started = threading.Event()
    stop = asyncio.Event()
    port = 0

    async def serve() -> None:
        nonlocal port
        async with http_server(app, "127.0.0.1", 0) as port:
            started.set()
            await stop.wait()

    def run() -> None:
        try:
            loop.run_until_complete(serve())
        finally:
            loop.run_until_complete(loop.shutdown_default_executor())
            loop.close()

    thread = threading.Thread(target=run)
    thread.start()
    assert started.wait(10), "the server did not start"
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join(15)
        assert not thread.is_alive(), "the server did not stop"
