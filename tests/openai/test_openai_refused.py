"""Everything that must be refused, and how: status, envelope, the field's name. Ranges are those of vLLM 0.32."""

import http.client
import json
from typing import Any
from urllib.parse import urlsplit

import pytest

import openai
from pdmesh.config import HttpConfig
from pdmesh.errors import InvalidRequest, MeshError, NotFound, Overloaded, PeerUnavailable
from pdmesh.openai.text import TextModel, stop_strings
from support.api_server import ApiServer, api_server
from support.echo_generator import EchoGenerator

BASE = {"model": "echo", "prompt": "The capital of France is", "max_tokens": 4, "temperature": 0}
HUGE_BIAS = {str(token_id): 1 for token_id in range(5000)}

RANGES: list[tuple[str, Any]] = [
    *[("n", value) for value in (0, 16385, -1, 2, 1.5, "2", True)],
    *[("temperature", value) for value in (-0.1, 2.01, float("nan"), float("inf"), "0", True)],
    *[("top_p", value) for value in (0, -0.1, 1.1, float("nan"))],
    *[("min_p", value) for value in (-0.1, 1.1)],
    *[("top_k", value) for value in (-2, 1.5)],
    *[("presence_penalty", value) for value in (2.1, -2.1)],
    *[("frequency_penalty", value) for value in (2.1, -2.1)],
    *[("repetition_penalty", value) for value in (0, -1, float("inf"))],
    *[("max_tokens", value) for value in (0, -1, 513, 1.5, 2**63, 2**64, "4", True)],
    *[("min_tokens", value) for value in (-1, 5)],
    *[("logprobs", value) for value in (21, -2, -1, "5", True)],
    *[("prompt_logprobs", value) for value in (21, -2)],
    *[("seed", value) for value in (2**63, -(2**63) - 1, 2**64, 1.5)],
    *[("stop", value) for value in ("", [""], ["a", "b", "c", "d", "e"], 5, ["x" * 2000])],
    *[("stop_token_ids", value) for value in ([-1], [99999999], ["a"], list(range(200)))],
    *[("allowed_token_ids", value) for value in ([], [-1], [99999999])],
    *[("logit_bias", value) for value in ({"99999999": 1}, {"-1": 1}, {"a": 1}, HUGE_BIAS, {"1": float("nan")})],
    *[("bad_words", value) for value in ([""], [" "], ["w"] * 129)],
    *[("truncate_prompt_tokens", value) for value in (-2, 0, 5000)],
    *[("prompt", value) for value in (None, "", [], [""], [[]], ["a", 1], [[1], "a"], [1.5], [True, False], 5, {})],
    *[("prompt", value) for value in ([99999999], [-1], [[1], [99999999]], ["a"] * 1025)],
    *[("cache_salt", value) for value in ("", "a@b", "a/b", "a\\b", "a\0b", "x" * 129)],
    *[("request_id", value) for value in ("x" * 129, "a\nb", "é", 5)],
    *[("priority", value) for value in (2**63, 1.5)],
    *[("stream", value) for value in ("yes", 1)],
    *[("suffix", value) for value in ("x",)],
    *[("structured_outputs", value) for value in ({"choice": ["a"]},)],
    *[("response_format", value) for value in ({"type": "json_object"}, {"type": "json_schema"}, {}, "x")],
    *[("prompt_embeds", value) for value in ("AAAA",)],
    *[("guided_json", value) for value in ({"type": "object"},)],
    *[("best_of", value) for value in (3,)],
    *[
        ("vllm_xargs", {"x": value})
        for value in (2**64, -(2**63) - 1, [2**64], None, {"y": 1}, [[1]], [True], "y" * 20_000)
    ],
    *[("vllm_xargs", value) for value in ([1], "x", 5)],
    *[("thinking_token_budget", value) for value in (5, 0, -2, 2**31, 1.5, "5", True)],
    *[("repetition_detection", value) for value in (5, [], {"max_pattern_size": -1}, {"max_pattern_size": 2**31})],
    *[("repetition_detection", {"max_pattern_size": 3, "min_count": value}) for value in (0, 1, -1, None, 2.5, "3")],
    *[
        ("repetition_detection", {"max_pattern_size": 3, "min_pattern_size": value, "min_count": 2})
        for value in (4, -1)
    ],
    *[("repetition_detection", value) for value in ({"min_pattern_size": 1}, {"patern": 1})],
    *[("logprob_token_ids", value) for value in ([1],)],
    *[("kv_transfer_params", value) for value in ({"do_remote_decode": True},)],
    *[("ticket", value) for value in ("forged",)],
    *[("stream_options", value) for value in ({"include_usage": True}, {})],
    *[("stream_interval", value) for value in (5,)],
]


@pytest.mark.parametrize(("field", "value"), RANGES, ids=[f"{name}-{repr(value)[:24]}" for name, value in RANGES])
def test_out_of_range_is_a_400_that_names_the_field(shared_server: ApiServer, field: str, value: Any) -> None:
    """Catalogue 22, 31, 41, 42, 46, 50, 51, 71 among them."""
    # NaN and infinity are no JSON, but Python's parser and clients exchange them.
    data = json.dumps({**BASE, field: value})
    answer = shared_server.raw("POST", "/v1/completions", content=data, headers={"Content-Type": "application/json"})
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert error["code"] == 400
    assert error["type"] in ("BadRequestError", "Bad Request")
    assert field in error["param"], error
    assert len(error["message"]) < 2000


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *[("temperature", 0), ("temperature", 2), ("top_p", 1e-9), ("top_k", 10**9), ("repetition_penalty", 1e308)],
        *[("max_tokens", 512), ("max_tokens", None), ("logprobs", 20), ("seed", 2**63 - 1), ("seed", -1)],
        *[("stop", ["a", "b", "c", "d"]), ("logit_bias", {}), ("logit_bias", {"0": 1e300}), ("min_tokens", 4)],
        *[("cache_salt", "x" * 128), ("response_format", {"type": "text"}), ("kv_transfer_params", None)],
        *[("vllm_xargs", {}), ("vllm_xargs", {"a": 2**64 - 1, "b": -(2**63), "c": [1, 1.5, "x"], "d": True, "e": ""})],
        *[("thinking_token_budget", -1), ("thinking_token_budget", None), ("repetition_detection", {})],
        *[("repetition_detection", {"max_pattern_size": 1, "min_pattern_size": 1, "min_count": 2})],
        *[("truncate_prompt_tokens", value) for value in (-1, 1, 512)],
        *[("priority", value) for value in (2**63 - 1, -(2**63))],
        *[("stop_token_ids", [0, 49151]), ("allowed_token_ids", [0]), ("bad_words", ["w"] * 64), ("n", 1)],
        *[("use_beam_search", False), ("suffix", None), ("tools", None), ("model", None), ("prompt", ["a"] * 3)],
    ],
)
def test_the_edges_of_the_ranges_are_accepted(shared_server: ApiServer, field: str, value: Any) -> None:
    answer = shared_server.post("/v1/completions", {**BASE, field: value})
    assert answer.status_code == 200, answer.text


def test_a_schema_error_is_never_422_and_is_bounded(shared_server: ApiServer) -> None:
    bad = {**BASE, "temperature": "x" * 100_000, "stop_token_ids": ["a"] * 50}
    answer = shared_server.post("/v1/completions", bad)
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert error["type"] == "Bad Request"
    assert error["message"].startswith("51 validation errors:\n  body.")
    assert len(error["message"].splitlines()) == 11
    assert len(error["message"]) < 4000


@pytest.mark.parametrize(
    "body", [b"", b"{", b"nonsense", b"[]", b"null", b'"x"', b"5", b"\xff\xfe", b'{"a":"\\ud800"}']
)
def test_catalogue_65_bodies_that_are_no_json_object(shared_server: ApiServer, body: bytes) -> None:
    for path in ("/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize"):
        answer = shared_server.raw("POST", path, content=body, headers={"Content-Type": "application/json"})
        assert answer.status_code == 400, (path, answer.text)
        assert answer.json()["error"]["param"] == "body"


def test_json_nested_100_000_deep_is_a_400(shared_server: ApiServer) -> None:
    body = b'{"prompt":' + b"[" * 100_000 + b"]" * 100_000 + b"}"
    answer = shared_server.raw("POST", "/v1/completions", content=body, headers={"Content-Type": "application/json"})
    assert answer.status_code == 400
    assert "recursion limit" in answer.json()["error"]["message"]


@pytest.mark.parametrize("content_type", ["text/plain", "application/x-www-form-urlencoded", "", "application/jsonx"])
def test_another_content_type_is_a_400(shared_server: ApiServer, content_type: str) -> None:
    answer = shared_server.raw("POST", "/v1/completions", content=b"{}", headers={"Content-Type": content_type})
    assert answer.status_code == 400
    assert answer.json()["error"]["message"] == "Unsupported Media Type: Only 'application/json' is allowed"


@pytest.mark.parametrize(
    ("header", "value"),
    [
        *[("X-Vllm-Priority", value) for value in (b"\xb2", b"-\xb3", b"--1", b"9" * 6000, b"1e3", b"")],
        *[("X-Request-Id", value) for value in (b"\xe9", b"x" * 500, b"")],
        *[("Authorization", b"Bearer \xb2"), ("Content-Type", b"application/json; charset=\xb2")],
    ],
)
def test_what_is_no_number_or_no_ascii_in_a_header_hurts_nobody(
    shared_server: ApiServer, header: str, value: bytes
) -> None:
    """A superscript two passes str.isdigit and fails int(): it was a 500."""
    headers: list[tuple[bytes, bytes]] = [(b"Content-Type", b"application/json"), (header.encode(), value)]
    answer = shared_server.raw("POST", "/v1/completions", content=json.dumps(BASE), headers=headers)
    assert answer.status_code == 200, answer.text
    assert answer.headers["x-request-id"].isascii()
    assert shared_server.generator.requests[-1].priority == 0


def test_a_priority_header_reaches_the_request(shared_server: ApiServer) -> None:
    for said, meant in (("-5", -5), (str(2**63 - 1), 2**63 - 1), (str(2**63), 0)):
        shared_server.post("/v1/completions", BASE, {"X-Vllm-Priority": said})
        assert shared_server.generator.requests[-1].priority == meant


def test_a_defect_is_a_500_that_is_named_and_counted_like_every_answer(text: TextModel) -> None:
    with api_server(text, EchoGenerator(failure=RuntimeError("secret"))) as server:
        answer = server.post("/v1/completions", BASE, {"X-Request-Id": "mine"})
        assert (answer.status_code, answer.headers["x-request-id"]) == (500, "mine")
        assert "secret" not in answer.text
        counted = 'http_requests_total{handler="/v1/completions",method="POST",status="5xx"} 1.0'
        assert counted in server.raw("GET", "/metrics").text


def test_json_with_a_charset_is_json(shared_server: ApiServer) -> None:
    headers = {"Content-Type": "application/json; charset=utf-8"}
    answer = shared_server.raw("POST", "/v1/completions", content=json.dumps(BASE), headers=headers)
    assert answer.status_code == 200


@pytest.mark.parametrize("declared", [True, False])
def test_a_body_over_the_bound_is_a_413(text: TextModel, declared: bool) -> None:
    with api_server(text, config=HttpConfig(max_body_bytes=2048)) as server:
        body = json.dumps({**BASE, "prompt": "x" * 4096}).encode()
        content = body if declared else iter([body[:1500], body[1500:]])
        answer = server.raw("POST", "/v1/completions", content=content, headers={"Content-Type": "application/json"})
        assert answer.status_code == 413
        assert "2048 bytes" in answer.json()["error"]["message"]
        assert server.post("/v1/completions", BASE).status_code == 200


def test_an_unknown_model_is_a_404_with_the_aliases(shared_server: ApiServer) -> None:
    with shared_server.client() as client, pytest.raises(openai.NotFoundError) as caught:
        client.completions.create(model="nope", prompt="x")
    assert caught.value.body == {
        "message": "The model `nope` does not exist. Valid aliases: echo, parrot.",
        "type": "NotFoundError",
        "param": "model",
        "code": 404,
    }
    assert shared_server.post("/v1/completions", {**BASE, "model": "parrot"}).json()["model"] == "parrot"


def test_unknown_routes_and_methods_answer_as_vllm(shared_server: ApiServer) -> None:
    with shared_server.http() as client:
        missing, wrong = client.get("/v1/nothing"), client.get("/v1/completions")
    assert (missing.status_code, missing.json()) == (404, {"detail": "Not Found"})
    assert (wrong.status_code, wrong.json()) == (405, {"detail": "Method Not Allowed"})


@pytest.mark.parametrize("path", ["/v1/embeddings", "/v1/responses"])
def test_an_endpoint_of_openai_that_is_not_served_says_so(shared_server: ApiServer, path: str) -> None:
    refused = shared_server.post(path, {"model": "m", "input": "x"})
    assert refused.status_code == 404
    assert refused.json()["error"]["message"].startswith(f"{path} is not served")
    assert refused.json()["error"]["code"] == 404


@pytest.mark.parametrize(
    ("length", "max_tokens", "message"),
    [
        (64, 5, "max_tokens must be at least 1, got 0."),
        (
            65,
            5,
            "This model's maximum context length is 64 tokens. However, your prompt contains at least 65 input tokens",
        ),
        (1, 65, "max_tokens=65 cannot be greater than max_model_len=64"),
    ],
)
def test_catalogue_28_30_the_context_is_a_bound(text: TextModel, length: int, max_tokens: int, message: str) -> None:
    with api_server(text, EchoGenerator(max_model_len=64)) as server:
        answer = server.post("/v1/completions", {"prompt": [504] * length, "max_tokens": max_tokens})
        assert answer.status_code == 400
        assert answer.json()["error"]["message"].startswith(message)
        assert not server.generator.requests


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"prompt": [[504]] * 129, "n": 128}, "n"),
        ({"prompt": [504] * 300, "n": 16384}, "n"),
        ({"prompt": [504] * 400, "n": 128, "prompt_logprobs": 20}, "n"),
        ({"prompt": [504] * 400, "n": 128, "logprobs": 20, "echo": True}, "n"),
        ({"prompt": [[504]] * 128, "n": 100, "logit_bias": {str(token_id): 1 for token_id in range(4000)}}, "n"),
        ({"prompt": [[504]] * 128, "n": 100, "allowed_token_ids": list(range(4000))}, "n"),
        ({"prompt": [[504]] * 1024, "allowed_token_ids": list(range(5000))}, "prompt"),
        ({"prompt": [[504] * 100] * 1024, "prompt_logprobs": 20}, "prompt"),
    ],
)
def test_what_is_small_in_a_body_and_gigabytes_when_multiplied_is_a_400(
    shared_server: ApiServer, body: dict[str, Any], param: str
) -> None:
    before = len(shared_server.generator.requests)
    answer = shared_server.post("/v1/completions", {"max_tokens": 1, **body})
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"] == param
    assert "at most" in answer.json()["error"]["message"]
    assert len(shared_server.generator.requests) == before


def test_choices_share_the_automata_of_their_stop_strings(
    shared_server: ApiServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They were built for every choice anew: n = 16384 with long stop strings held the server for half a minute."""
    built: list[str] = []
    build = stop_strings._failures
    monkeypatch.setattr(stop_strings, "_failures", lambda stop: built.append(stop) or build(stop))
    answer = shared_server.post(
        "/v1/completions", {"prompt": ["x", "y"], "n": 50, "max_tokens": 1, "stop": ["ab", "c"]}
    )
    assert len(answer.json()["choices"]) == 100
    assert len(built) == 2


def test_a_text_that_cannot_fit_is_refused_before_it_is_tokenised(text: TextModel) -> None:
    with api_server(text, EchoGenerator(max_model_len=64)) as server:
        answer = server.post("/v1/completions", {"prompt": "x " * 64 * 50})
        assert answer.status_code == 400
        assert "characters" in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    ("failure", "status", "retry_after"),
    [
        (InvalidRequest("engine says no", param="top_k"), 400, None),
        (NotFound("no such adapter", param="model"), 404, None),
        (Overloaded("busy", retry_after_s=2.2), 503, "3"),
        (PeerUnavailable("no engine"), 503, "1"),
        (RuntimeError("secret detail"), 500, None),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_catalogue_16_27_an_early_failure_keeps_its_status(
    text: TextModel, failure: Exception, status: int, retry_after: str | None, stream: bool
) -> None:
    with api_server(text, EchoGenerator(fail_after=0, failure=failure)) as server:
        answer = server.post("/v1/completions", {**BASE, "stream": stream})
        assert answer.status_code == status
        error = answer.json()["error"]
        assert error["code"] == status
        assert error["param"] == getattr(failure, "param", None)
        assert "secret" not in error["message"]
        assert answer.headers.get("retry-after") == retry_after
        assert answer.headers["x-pdmesh-route"].startswith("prefill=prefill-0; decode=decode-0; reason=test;")
        assert answer.headers["x-request-id"]
        assert server.generator.num_running == 0


@pytest.mark.parametrize(("failure", "is_told"), [(PeerUnavailable("full"), False), (NotFound("no such model"), True)])
def test_kv_is_given_up_for_a_refusal_that_is_final_and_kept_for_a_leg_that_may_be_tried_elsewhere(
    text: TextModel, failure: MeshError, is_told: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[dict[str, object]] = []
    generator = EchoGenerator(failure=failure)
    monkeypatch.setattr(generator, "refused", told.append)
    params = {"do_remote_prefill": True}
    with api_server(text, generator, role="engine") as server:
        refused = server.post("/v1/completions", {**BASE, "kv_transfer_params": params})
    assert refused.status_code == failure.status
    assert told == ([params] if is_told else [])


def test_no_engine_is_a_503_everywhere(text: TextModel) -> None:
    gone = EchoGenerator(failure=PeerUnavailable("no engine is known yet"), healthy_now=False)
    with api_server(text, gone) as server, server.http() as client:
        for answer in (client.get("/v1/models"), server.post("/v1/completions", BASE)):
            assert answer.status_code == 503
            assert answer.json()["error"]["message"] == "no engine is known yet"
        health = client.get("/health")
        assert (health.status_code, health.content) == (503, b"no engine\n")


def test_an_error_delta_of_the_engine_becomes_its_error(text: TextModel) -> None:
    broken = EchoGenerator(error_delta=("TransferFailed", "KV is gone", ""))
    with api_server(text, broken) as server:
        answer = server.post("/v1/completions", BASE)
    assert answer.status_code == 502
    assert answer.json()["error"]["message"] == "KV is gone"


def test_pipelined_garbage_does_not_hurt(shared_server: ApiServer) -> None:
    address = urlsplit(shared_server.url)
    connection = http.client.HTTPConnection(address.hostname or "", address.port, timeout=10)
    connection.request("POST", "/v1/completions", body=b"\0" * 100, headers={"Content-Type": "application/json"})
    assert connection.getresponse().status == 400
    connection.close()
    assert shared_server.post("/v1/completions", BASE).status_code == 200
