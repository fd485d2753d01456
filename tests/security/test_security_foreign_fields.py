"""What a client sends of a handoff is refused or not looked at, at every endpoint and wherever in a request it stands."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from pdmesh.models.source import DEMO_MODEL
from pdmesh.openai.text import TextModel, load_text_model
from support.api_server import ApiServer, api_server
from support.echo_generator import EchoGenerator

FORGED = "AWZvcmdlZA=="
REMOTE = {"do_remote_prefill": True, "remote_host": "10.0.0.1", "remote_port": 8101, "remote_engine_id": "prefill-1"}
CHAT = {"messages": [{"role": "user", "content": "x"}]}
GENERATING = {"/v1/completions": {"prompt": "x", "max_tokens": 1}, "/v1/chat/completions": CHAT | {"max_tokens": 1}}
RENDERING = {f"{path}/render": body for path, body in GENERATING.items()}
OTHERS = {"/tokenize": {"prompt": "x"}, "/detokenize": {"tokens": [5, 6]}}
TOP = [{"ticket": FORGED}, {"ticket": {"offer_id": "o-1"}}, {"kv_transfer_params": REMOTE}, {"kv_transfer_params": {}}]
EMPTY = [{"ticket": None}, {"ticket": ""}, {"ticket": {}}, {"kv_transfer_params": None}]
NESTED = [
    {"extra_body": {"ticket": FORGED, "kv_transfer_params": REMOTE}},
    {"metadata": {"ticket": FORGED, "kv_transfer_params": "x"}},
    {"vllm_xargs": {"ticket": FORGED, "kv_transfer_params": "x"}},
    {"nvext": {"ticket": FORGED, "kv_transfer_params": REMOTE}},
]
HEADERS = dict.fromkeys(
    ("ticket", "x-pdmesh-ticket", "kv_transfer_params", "x-kv-transfer-params", "pdmesh-auth", "pdmesh-session"), FORGED
)


@pytest.fixture(scope="module")
def text() -> TextModel:
    return load_text_model(DEMO_MODEL)


@pytest.fixture(scope="module", params=["proxy", "engine"])
def server(request: pytest.FixtureRequest, text: TextModel) -> Iterator[ApiServer]:
    with api_server(text, EchoGenerator(), role=request.param) as running:
        yield running


@pytest.fixture(scope="module")
def proxy(text: TextModel) -> Iterator[ApiServer]:
    with api_server(text, EchoGenerator(), role="proxy") as running:
        yield running


@pytest.mark.parametrize("path", [*GENERATING, *RENDERING])
@pytest.mark.parametrize("forged", TOP, ids=str)
def test_the_proxy_refuses_them_by_name(proxy: ApiServer, path: str, forged: dict[str, Any]) -> None:
    answer = proxy.post(path, (GENERATING | RENDERING)[path] | forged)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == next(iter(forged))
    assert proxy.generator.requests == []


@pytest.mark.parametrize("path", [*GENERATING, *RENDERING])
def test_no_port_takes_a_ticket(server: ApiServer, path: str) -> None:
    answer = server.post(path, (GENERATING | RENDERING)[path] | {"ticket": FORGED})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "ticket")


@pytest.mark.parametrize("path", GENERATING)
@pytest.mark.parametrize("empty", EMPTY, ids=str)
def test_empty_ones_are_as_none(server: ApiServer, path: str, empty: dict[str, Any]) -> None:
    server.generator.requests.clear()
    assert server.post(path, GENERATING[path] | empty).status_code == 200
    _check_unharmed(server)


@pytest.mark.parametrize("path", GENERATING)
@pytest.mark.parametrize("forged", NESTED, ids=lambda forged: next(iter(forged)))
def test_inside_other_fields_they_mean_nothing(server: ApiServer, path: str, forged: dict[str, Any]) -> None:
    server.generator.requests.clear()
    answer = server.post(path, GENERATING[path] | forged)
    assert answer.status_code == 200
    _check_unharmed(server)


@pytest.mark.parametrize("path", GENERATING)
def test_in_headers_and_query_they_mean_nothing(server: ApiServer, path: str) -> None:
    server.generator.requests.clear()
    query = f"?ticket={FORGED}&kv_transfer_params=%7B%22do_remote_prefill%22%3Atrue%7D"
    assert server.post(path + query, GENERATING[path], headers=HEADERS).status_code == 200
    _check_unharmed(server)


@pytest.mark.parametrize("path", OTHERS)
@pytest.mark.parametrize("forged", [*TOP, *NESTED], ids=str)
def test_endpoints_without_a_handoff_do_as_without_them(server: ApiServer, path: str, forged: dict[str, Any]) -> None:
    server.generator.requests.clear()
    plain, answer = server.post(path, OTHERS[path]), server.post(path, OTHERS[path] | forged)
    assert (answer.status_code, answer.json()) == (plain.status_code, plain.json())
    assert server.generator.requests == []


def _check_unharmed(server: ApiServer) -> None:
    """The generator was asked for what the request says without them."""
    (request,) = server.generator.requests
    assert request.kv_transfer_params is None
    assert request.cache_salt == ""
    seen = repr(request).replace(repr(request.sampling.extra_args), "")
    assert FORGED not in seen
    assert "10.0.0.1" not in seen
