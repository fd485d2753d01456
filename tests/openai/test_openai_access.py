"""API keys, tenants, CORS, and the routes around generation."""

import re
import time

import pytest

import openai
import pdmesh
from pdmesh.config import HttpConfig
from pdmesh.openai.intake.identity import narrow_salt
from pdmesh.openai.text import TextModel
from support.api_server import ApiServer, api_server
from support.echo_generator import EchoGenerator

KEYS = HttpConfig(api_key=["alpha-key", "beta-key"])


def test_catalogue_69_every_route_but_health_needs_the_key(text: TextModel) -> None:
    with api_server(text, config=KEYS) as server, server.http() as client:
        document = client.get("/openapi.json", headers={"Authorization": "Bearer alpha-key"}).json()
        routes = [(method, path) for path, methods in document["paths"].items() for method in methods]
        assert len(routes) >= 10
        for method, path in [*routes, ("get", "/openapi.json"), ("get", "/nothing"), ("post", "/invocations")]:
            answer = client.request(method, path.replace("{model}", "echo"))
            assert answer.status_code == (200 if path == "/health" else 401), path
        assert client.get("/ping").status_code == client.post("/ping").status_code == 200


@pytest.mark.parametrize("header", ["", "Bearer", "Bearer wrong", "alpha-key", "Basic alpha-key", "Bearer a b"])
def test_a_wrong_key_is_a_401_in_the_envelope(text: TextModel, header: str) -> None:
    with api_server(text, config=KEYS) as server:
        answer = server.post("/v1/completions", {"prompt": "x"}, {"Authorization": header})
        assert answer.status_code == 401
        assert answer.json()["error"]["type"] == "AuthenticationError"
        assert answer.headers["www-authenticate"] == "Bearer"
        assert not server.generator.requests


def test_the_client_raises_authentication_error(text: TextModel) -> None:
    with api_server(text, config=KEYS) as server:
        with server.client("wrong") as client, pytest.raises(openai.AuthenticationError):
            client.models.list()
        with server.client("beta-key") as client:
            assert [model.id for model in client.models.list()] == ["echo", "parrot"]


def test_tenants_have_caches_of_their_own(text: TextModel) -> None:
    with api_server(text, config=KEYS) as server:
        for key, salt in [("alpha-key", None), ("beta-key", None), ("alpha-key", "s"), ("beta-key", "s")]:
            headers = {"Authorization": f"Bearer {key}"}
            server.post("/v1/completions", {"prompt": "x", "cache_salt": salt}, headers)
        salts = [request.cache_salt for request in server.generator.requests]
    assert len(set(salts)) == 4
    assert all(salts)
    assert "alpha" not in "".join(salts)


def test_without_keys_only_a_client_salt_narrows() -> None:
    assert narrow_salt("", "") == ""
    assert narrow_salt("", "a") != narrow_salt("", "b")
    assert narrow_salt("k", "") == narrow_salt("k", "")
    assert narrow_salt("k", "") != narrow_salt("", "k")


def test_cors_is_closed_by_default_and_answers_without_a_key(text: TextModel) -> None:
    ask = {"Origin": "https://a.example", "Access-Control-Request-Method": "POST"}
    with api_server(text, config=KEYS) as server:
        refused = server.raw("OPTIONS", "/v1/completions", headers=ask)
        assert (refused.status_code, refused.text) == (400, "Disallowed CORS origin")
    allowed = HttpConfig(api_key=["alpha-key"], allowed_origins=["https://a.example"])
    with api_server(text, config=allowed) as server:
        answer = server.raw("OPTIONS", "/v1/completions", headers=ask)
        assert answer.status_code == 200
        assert answer.headers["access-control-allow-origin"] == "https://a.example"


def test_models_by_list_and_by_id(shared_server: ApiServer) -> None:
    with shared_server.client() as client:
        card = client.models.retrieve("echo")
        assert (card.id, card.object, card.owned_by) == ("echo", "model", "pdmesh")
        assert card.to_dict()["max_model_len"] == 512
        with pytest.raises(openai.NotFoundError):
            client.models.retrieve("nope")


def test_a_model_name_may_have_slashes(text: TextModel) -> None:
    with api_server(text, EchoGenerator(name="org/model")) as server, server.http() as client:
        assert client.get("/v1/models/org/model").json()["id"] == "org/model"


def test_version_load_health_and_metrics(shared_server: ApiServer) -> None:
    with shared_server.http() as client:
        assert client.get("/version").json() == {"version": pdmesh.__version__}
        assert client.get("/load").json() == {"server_load": 0}
        health = client.get("/health")
        assert (health.status_code, health.content) == (200, b"")
        assert 'http_request_duration_seconds_count{handler="/health",method="GET"}' in client.get("/metrics").text


def test_small_answers_do_not_wait_for_an_acknowledgement(shared_server: ApiServer) -> None:
    """Head and body are two writes; without TCP_NODELAY the second waits 40 ms on a connection that is kept open."""
    times = []
    for _ in range(20):
        started = time.monotonic()
        shared_server.post("/v1/completions", {"prompt": "x", "max_tokens": 1})
        times.append(time.monotonic() - started)
    assert min(times) < 0.03


def test_the_openapi_document_describes_the_bodies(shared_server: ApiServer) -> None:
    document = shared_server.raw("GET", "/openapi.json").json()
    schemas = document["components"]["schemas"]
    body = document["paths"]["/v1/chat/completions"]["post"]["requestBody"]["content"]["application/json"]["schema"]
    assert body == {"$ref": "#/components/schemas/ChatBody"}
    assert {"messages", "temperature", "top_k"} <= set(schemas["ChatBody"]["properties"])
    referred = set(re.findall(r"#/components/schemas/(\w+)", str(document)))
    assert referred <= set(schemas)


def test_catalogue_3_tokenize_and_detokenize_are_inverse(shared_server: ApiServer, text: TextModel) -> None:
    for said in ("  a  b", " x", "日本é🙂", "<|im_start|>user\n"):
        made = shared_server.post("/tokenize", {"prompt": said, "return_token_strs": True}).json()
        assert made["count"] == len(made["tokens"]) == len(made["token_strs"])
        assert made["max_model_len"] == 512
        assert shared_server.post("/detokenize", {"tokens": made["tokens"]}).json() == {"prompt": said}
    chat = shared_server.post("/tokenize", {"messages": [{"role": "user", "content": "hi"}]}).json()
    assert text.decode(chat["tokens"], False).endswith("<|im_start|>assistant\n")


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/tokenize", {}),
        ("/tokenize", {"prompt": "a", "messages": []}),
        ("/tokenize", {"prompt": 5}),
        ("/tokenize", {"messages": [{"role": "user", "content": "x"}], "chat_template": "x"}),
        ("/detokenize", {}),
        ("/detokenize", {"tokens": [99999999]}),
        ("/detokenize", {"tokens": [-1]}),
        ("/detokenize", {"tokens": ["a"]}),
    ],
)
def test_what_the_tokenizer_routes_refuse(shared_server: ApiServer, path: str, body: dict[str, object]) -> None:
    assert shared_server.post(path, body).status_code == 400


def test_an_engine_port_passes_kv_transfer_params_both_ways(text: TextModel) -> None:
    made = {"do_remote_prefill": True, "remote_block_ids": [[1, 2]]}
    asked = {"do_remote_decode": True, "remote_engine_id": None}
    with api_server(text, EchoGenerator(transfer=made), role="engine") as server:
        body = {"prompt": "x", "max_tokens": 1, "kv_transfer_params": asked}
        assert server.post("/v1/completions", body).json()["kv_transfer_params"] == made
        chat = {"messages": [{"role": "user", "content": "x"}], "kv_transfer_params": asked, "max_tokens": 1}
        assert server.post("/v1/chat/completions", chat).json()["kv_transfer_params"] == made
        assert [request.kv_transfer_params for request in server.generator.requests] == [asked, asked]
        # Aborting at the last token would drop the offer that the parameters name.
        assert server.generator.aborted == []
        batch = server.post("/v1/completions", {**body, "prompt": ["x", "y"]})
        assert batch.status_code == 400
        assert server.post("/v1/completions", {**body, "ticket": "x"}).status_code == 400
