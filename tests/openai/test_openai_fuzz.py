"""Whatever JSON a client sends: an answer or a 4xx in the envelope, never a defect. The app runs in this process."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx
import pytest
from fastapi import FastAPI
from hypothesis import given, settings
from hypothesis import strategies as st

from pdmesh.openai.schemas import ChatBody, CompletionBody
from pdmesh.openai.text import TextModel
from support.api_server import make_app
from support.echo_generator import EchoGenerator

ODD_NUMBERS = [2**31, 2**63 - 1, 2**63, -(2**63), 10**40, 10**400, 1e308, 1e-300, -0.0, float("nan"), float("inf")]
ODD_TEXTS = [
    "\0",
    "²",
    "٣",
    "\ud800",
    "🙂",
    "x" * 3000,
    "<|im_end|>",
    "assistant",
    "text",
    "-1",
    "{{7*7}}",
    "__class__",
]
ODD_KEYS = ["type", "content", "role", "text", "messages", "0", "-0", "²", "include_usage", "chat_template"]
NAMES = sorted(
    {*CompletionBody.model_fields, *ChatBody.model_fields}
    | {"best_of", "suffix", "guided_json", "functions", "modalities", "stream_interval", "length_penalty", "unknown"}
)

scalars = (
    st.none()
    | st.booleans()
    | st.integers(-3, 30)
    | st.floats()
    | st.text(max_size=6)
    | st.sampled_from(ODD_NUMBERS)
    | st.sampled_from(ODD_TEXTS)
)
values = st.recursive(
    scalars,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(st.text(max_size=4) | st.sampled_from(ODD_KEYS), inner, max_size=4)
    ),
    max_leaves=8,
)
prompts = st.sampled_from(["x", "The capital", [1, 2, 3], ["a", "b"], [[1, 2], [3]]])
messages = st.lists(
    st.fixed_dictionaries(
        {"role": st.sampled_from(["user", "assistant", "system"]), "content": st.text(max_size=5)},
        optional={"name": values, "tool_calls": values},
    ),
    min_size=1,
    max_size=3,
)
sane = st.fixed_dictionaries(
    {},
    optional={
        "n": st.integers(1, 3),
        "max_tokens": st.integers(0, 6),
        "temperature": st.sampled_from([0, 0.5, 1]),
        "stop": st.sampled_from(["a", ["l", " "], "\n", ["capital", "cap"]]),
        "include_stop_str_in_output": st.booleans(),
        "stream": st.booleans(),
        "stream_options": st.sampled_from([{"include_usage": True, "continuous_usage_stats": True}, {}]),
        "echo": st.booleans(),
        "logprobs": st.booleans() | st.integers(0, 5),
        "top_logprobs": st.integers(0, 4),
        "prompt_logprobs": st.integers(0, 3),
        "return_token_ids": st.booleans(),
        "return_tokens_as_token_ids": st.booleans(),
        "truncate_prompt_tokens": st.integers(-1, 4),
        "logit_bias": st.dictionaries(st.sampled_from(["1", "-0", "5", "²"]), st.floats() | st.integers(), max_size=2),
        "bad_words": st.lists(st.text(max_size=3), max_size=2),
        "continue_final_message": st.booleans(),
        "add_generation_prompt": st.booleans(),
        "seed": st.integers(),
        "cache_salt": st.text(max_size=3),
        "request_id": st.text(max_size=3),
        "chat_template_kwargs": st.dictionaries(st.text(max_size=4) | st.sampled_from(ODD_KEYS), values, max_size=2),
        "documents": st.lists(st.dictionaries(st.text(max_size=3), values, max_size=2), max_size=2),
        "priority": st.integers(),
    },
)
wild = st.just({}) | st.dictionaries(st.sampled_from(NAMES), values, max_size=2)
headers = st.fixed_dictionaries(
    {},
    optional={
        "x-vllm-priority": st.binary(max_size=4) | st.just(b"\xb2"),
        "x-request-id": st.binary(max_size=5),
        "authorization": st.binary(max_size=8),
        "content-length": st.sampled_from([b"\xb2", b"9" * 6000, b"-1"]),
    },
)


@pytest.fixture(scope="module")
def app(text: TextModel) -> FastAPI:
    return make_app(text, EchoGenerator(cached_tokens=1))


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_no_body_and_no_header_is_a_defect_of_ours(app: FastAPI, path: str) -> None:
    with asyncio.Runner() as runner:

        @settings(max_examples=150, deadline=None)
        @given(prompts | values, messages, sane, wild, headers)
        def check(prompt: Any, said: Any, fields: dict[str, Any], odd: dict[str, Any], sent: dict[str, bytes]) -> None:
            subject = {"prompt": prompt} if path == "/v1/completions" else {"messages": said}
            body = {**subject, **fields, **odd}
            answer = runner.run(post(app, path, json.dumps(body).encode(), sent))
            assert answer.status_code in (200, 400, 404, 413), answer.text
            assert answer.headers["x-request-id"]
            if answer.status_code != 200:
                assert answer.json()["error"]["code"] == answer.status_code
            elif body.get("stream"):
                assert answer.text.endswith("data: [DONE]\n\n")
                assert '"error"' not in answer.text
            else:
                assert answer.json()["choices"]

        check()


async def post(app: FastAPI, path: str, body: bytes, headers: dict[str, bytes]) -> httpx.Response:
    """Send what a socket's HTTP parser might refuse, too."""
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://mesh") as client:
        request = client.build_request("POST", path, content=body)
        fields = [(b"content-type", b"application/json"), *((name.encode(), value) for name, value in headers.items())]
        request.headers = httpx.Headers(fields)
        return await client.send(request)
