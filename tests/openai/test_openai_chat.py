"""/v1/chat/completions through real sockets and the real clients."""

import asyncio

import pytest

from openai import AsyncOpenAI
from pdmesh.openai.text import TextModel
from support.api_server import ApiServer, api_server
from support.echo_generator import EchoGenerator
from support.sse import chunks_of, stream_frames

MESSAGES = [{"role": "user", "content": "Hello"}]
REPLY = "The capital of France"


def test_a_chat_answer_through_the_client(shared_server: ApiServer) -> None:
    with shared_server.client() as client:
        answer = client.chat.completions.create(model="echo", messages=MESSAGES)  # type: ignore[arg-type]
    assert answer.choices[0].message.content == REPLY
    assert answer.choices[0].message.role == "assistant"
    assert answer.choices[0].finish_reason == "stop"
    assert answer.id.startswith("chatcmpl-")


def test_the_async_client_streams(shared_server: ApiServer) -> None:
    async def run() -> tuple[str, int]:
        async with AsyncOpenAI(base_url=f"{shared_server.url}/v1", api_key="none", max_retries=0) as client:
            stream = await client.chat.completions.create(
                model="parrot",
                messages=MESSAGES,  # type: ignore[arg-type]
                stream=True,
                stream_options={"include_usage": True},
            )
            said, num_tokens = "", 0
            async for chunk in stream:
                said += (chunk.choices[0].delta.content or "") if chunk.choices else ""
                num_tokens = chunk.usage.completion_tokens if chunk.usage else num_tokens
            return said, num_tokens

    assert asyncio.run(run()) == (REPLY, 5)


def test_golden_chat_frames(shared_server: ApiServer) -> None:
    frames = stream_frames(shared_server, "/v1/chat/completions", {"messages": MESSAGES, "max_tokens": 2})
    assert frames[-1] == "data: [DONE]"
    first, second, third = chunks_of(frames)
    assert first["object"] == "chat.completion.chunk"
    assert first["choices"] == [
        {"index": 0, "delta": {"role": "assistant", "content": ""}, "logprobs": None, "finish_reason": None}
    ]
    assert (first["prompt_token_ids"], first["prompt_text"]) == (None, None)
    assert second["choices"] == [
        {"index": 0, "delta": {"content": "The"}, "logprobs": None, "finish_reason": None, "token_ids": None}
    ]
    assert "prompt_token_ids" not in second
    # Catalogue 12: the last text and the finish_reason share a chunk.
    assert third["choices"] == [
        {
            "index": 0,
            "delta": {"content": " capital"},
            "logprobs": None,
            "finish_reason": "length",
            "stop_reason": None,
            "token_ids": None,
        }
    ]
    assert [("system_fingerprint" in chunk, "usage" in chunk) for chunk in (first, second, third)] == [
        (False, False),
        (False, False),
        (True, False),
    ]


def test_every_choice_of_a_stream_begins_with_its_role(shared_server: ApiServer) -> None:
    body = {"messages": MESSAGES, "n": 2, "max_tokens": 2}
    deltas: dict[int, list[dict[str, str]]] = {}
    for chunk in chunks_of(stream_frames(shared_server, "/v1/chat/completions", body)):
        deltas.setdefault(chunk["choices"][0]["index"], []).append(chunk["choices"][0]["delta"])
    assert sorted(deltas) == [0, 1]
    for found in deltas.values():
        assert found[0] == {"role": "assistant", "content": ""}
        assert "".join(delta["content"] for delta in found) == "The capital"


def test_catalogue_40_chat_logprobs_have_content_with_bytes(text: TextModel) -> None:
    reply = text.encode("é🙂")
    with api_server(text, EchoGenerator(reply=reply)) as server:
        body = {"messages": MESSAGES, "logprobs": True, "top_logprobs": 2, "max_tokens": len(reply)}
        content = server.post("/v1/chat/completions", body).json()["choices"][0]["logprobs"]["content"]
        streamed = [
            entry
            for chunk in chunks_of(stream_frames(server, "/v1/chat/completions", body))
            for entry in (chunk["choices"][0]["logprobs"] or {"content": []})["content"]
        ]
    assert streamed == content
    assert "".join(entry["token"] for entry in content) == "é🙂"
    # The bytes are each token's own, so that halves of characters are not lost.
    assert bytes(byte for entry in content for byte in entry["bytes"]).decode() == "é🙂"
    assert all(len(entry["top_logprobs"]) == 2 for entry in content)
    assert content[0]["top_logprobs"][0]["token"] == content[0]["token"]


def test_logprobs_without_alternatives(shared_server: ApiServer) -> None:
    body = {"messages": MESSAGES, "logprobs": True, "max_tokens": 1}
    content = shared_server.post("/v1/chat/completions", body).json()["choices"][0]["logprobs"]["content"]
    assert [(entry["token"], entry["top_logprobs"]) for entry in content] == [("The", [])]


def test_max_completion_tokens_wins(shared_server: ApiServer) -> None:
    """Catalogue 23."""
    body = {"messages": MESSAGES, "max_tokens": 3, "max_completion_tokens": 1}
    assert shared_server.post("/v1/chat/completions", body).json()["usage"]["completion_tokens"] == 1


def test_chat_may_fill_the_context_by_default(text: TextModel) -> None:
    with api_server(text) as server:
        server.post("/v1/chat/completions", {"messages": MESSAGES})
        request = server.generator.requests[0]
    assert request.sampling.max_tokens == server.generator.max_model_len - len(request.token_ids)


def test_messages_become_the_prompt_by_the_models_template(text: TextModel) -> None:
    with api_server(text) as server:
        parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
        body = {"messages": [{"role": "system", "content": "S"}, {"role": "user", "content": parts}]}
        answer = server.post("/v1/chat/completions", {**body, "return_prompt_text": True, "return_token_ids": True})
    rendered = "<|im_start|>system\nS<|im_end|>\n<|im_start|>user\na\nb<|im_end|>\n<|im_start|>assistant\n"
    assert answer.json()["prompt_text"] == rendered
    assert answer.json()["prompt_token_ids"] == text.encode(rendered, add_special_tokens=False)


def test_a_final_message_is_continued_and_echoed(text: TextModel) -> None:
    messages = [*MESSAGES, {"role": "assistant", "content": "I think "}]
    body = {"messages": messages, "continue_final_message": True, "add_generation_prompt": False, "max_tokens": 1}
    with api_server(text) as server:
        answer = server.post("/v1/chat/completions", {**body, "echo": True, "return_prompt_text": True}).json()
        assert answer["prompt_text"].endswith("<|im_start|>assistant\nI think ")
        assert answer["choices"][0]["message"]["content"] == "I think The"
        plain = server.post("/v1/chat/completions", body).json()
        assert plain["choices"][0]["message"]["content"] == "The"


@pytest.mark.parametrize(
    ("extra", "param"),
    [
        ({"messages": []}, "messages"),
        ({"messages": [{"content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user"}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": []}]}, "messages[0].content"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
            "messages[0].content[0]",
        ),
        ({"chat_template": "{{ 1 }}"}, "chat_template"),
        ({"chat_template_kwargs": {"chat_template": "{{ 1 }}"}}, "chat_template_kwargs"),
        ({"continue_final_message": True}, "continue_final_message"),
        ({"tools": []}, "tools"),
        ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools"),
        ({"tools": [{"type": "function"}], "tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": "auto"}, "tool_choice"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "logprobs"),
        ({"logprobs": 1}, "body.logprobs"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"response_format": {"type": "json_schema"}}, "response_format"),
        ({"functions": [{"name": "f"}]}, "functions"),
        ({"modalities": ["text", "audio"]}, "modalities"),
        ({"max_completion_tokens": 0}, "max_completion_tokens"),
        ({"max_completion_tokens": 513}, "max_completion_tokens"),
    ],
)
def test_what_chat_refuses_names_the_field(shared_server: ApiServer, extra: dict[str, object], param: str) -> None:
    """Catalogue 52, 60 and 61 among them; the server answers the next request."""
    refused = shared_server.post("/v1/chat/completions", {"messages": MESSAGES, **extra})
    assert refused.status_code == 400, refused.text
    assert refused.json()["error"]["param"] == param
    assert shared_server.post("/v1/chat/completions", {"messages": MESSAGES}).status_code == 200


@pytest.mark.parametrize("choice", [{}, {"tool_choice": "auto"}], ids=str)
def test_tools_are_said_not_to_be_served_yet(shared_server: ApiServer, choice: dict[str, object]) -> None:
    body = {"messages": MESSAGES, "tools": [{"type": "function"}], **choice}
    assert "tools are not served yet" in shared_server.post("/v1/chat/completions", body).json()["error"]["message"]


def test_tools_may_be_shown_without_being_called(shared_server: ApiServer) -> None:
    body = {"messages": MESSAGES, "tools": [{"type": "function"}], "tool_choice": "none"}
    assert shared_server.post("/v1/chat/completions", body).status_code == 200


def test_a_model_without_a_template_says_so(text: TextModel) -> None:
    plain = TextModel(name="plain", tokenizer=text._tokenizer, eos_token_ids=[2])
    with api_server(plain) as server:
        refused = server.post("/v1/chat/completions", {"messages": MESSAGES})
        assert refused.status_code == 400
        assert "chat_template.jinja" in refused.json()["error"]["message"]
        assert server.post("/v1/completions", {"prompt": "x"}).status_code == 200
