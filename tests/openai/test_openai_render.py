"""vLLM's render routes: what a prompt is for the engine, for routers that follow KV events."""

from __future__ import annotations

import pytest

from pdmesh.openai.text import TextModel
from support.api_server import ApiServer

MESSAGES = [{"role": "user", "content": "Name three rivers."}]


def test_a_completions_prompts_are_rendered_in_order(shared_server: ApiServer, text: TextModel) -> None:
    answer = shared_server.post(
        "/v1/completions/render", {"prompt": ["The sea", "The wind"], "max_tokens": 3}, {"x-request-id": "mine"}
    )
    assert answer.status_code == 200
    first, second = answer.json()
    assert first["token_ids"] == text.encode("The sea", add_special_tokens=True)
    assert second["token_ids"] == text.encode("The wind", add_special_tokens=True)
    assert first["request_id"] == "mine"
    [given] = shared_server.post("/v1/completions/render", {"prompt": [5, 6, 7]}).json()
    assert given["token_ids"] == [5, 6, 7]


def test_a_conversation_is_rendered_as_it_would_run(shared_server: ApiServer) -> None:
    body = {"messages": MESSAGES, "max_completion_tokens": 2}
    rendered = shared_server.post("/v1/chat/completions/render", body)
    assert rendered.status_code == 200
    ran = shared_server.post("/v1/chat/completions", body | {"return_token_ids": True})
    assert rendered.json()["token_ids"] == ran.json()["prompt_token_ids"]
    cut = shared_server.post("/v1/chat/completions/render", body | {"truncate_prompt_tokens": 4}).json()
    assert cut["token_ids"] == rendered.json()["token_ids"][-4:]


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/v1/completions/render", {"prompt": []}, "prompt"),
        ("/v1/completions/render", {"prompt": "a", "kv_transfer_params": {}}, "kv_transfer_params"),
        ("/v1/chat/completions/render", {"messages": []}, "messages"),
        ("/v1/chat/completions/render", {"messages": MESSAGES, "model": "other"}, "model"),
    ],
)
def test_what_could_not_run_is_not_rendered(shared_server: ApiServer, path: str, body: object, param: str) -> None:
    answer = shared_server.post(path, body)
    assert answer.status_code in (400, 404), answer.text
    assert answer.json()["error"]["param"] == param
