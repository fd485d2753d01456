"""The real `openai` client against a real mesh: completions, chat, streaming, errors."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import openai
from pdmesh.models.source import DEMO_MODEL
from support.mesh import Mesh, mesh

pytestmark = [pytest.mark.mesh, pytest.mark.timeout(180)]

KEY = "sk-test-key"


@pytest.fixture(scope="module")
def running() -> Iterator[Mesh]:
    with mesh(DEMO_MODEL, proxy_flags=("--pd-min-prompt-tokens", "0", "--api-key", KEY)) as started:
        yield started


@pytest.fixture
def client(running: Mesh) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{running.url}/v1", api_key=KEY, max_retries=0, timeout=60) as made:
        yield made


@pytest.fixture
def model(client: openai.OpenAI) -> str:
    return client.models.list().data[0].id


def test_models(client: openai.OpenAI, model: str) -> None:
    assert client.models.retrieve(model).id == model
    with pytest.raises(openai.NotFoundError, match="nope"):
        client.models.retrieve("nope")


def test_completion_and_its_stream_agree(client: openai.OpenAI, model: str) -> None:
    whole = client.completions.create(model=model, prompt="The capital of France is", max_tokens=8, temperature=0)
    assert "Paris" in whole.choices[0].text
    assert whole.usage is not None
    assert (whole.usage.completion_tokens, whole.choices[0].finish_reason) == (8, "length")
    stream = client.completions.create(
        model=model, prompt="The capital of France is", max_tokens=8, temperature=0, stream=True,
        stream_options={"include_usage": True},
    )  # fmt: skip
    chunks = list(stream)
    assert "".join(c.choices[0].text for c in chunks if c.choices) == whole.choices[0].text
    assert chunks[-1].usage == whole.usage or chunks[-1].usage.completion_tokens == 8  # type: ignore[union-attr]


def test_chat_and_its_stream_agree(client: openai.OpenAI, model: str) -> None:
    messages = [{"role": "user", "content": "What is the capital of France? Answer in one word."}]
    whole = client.chat.completions.create(model=model, messages=messages, max_tokens=12, temperature=0, logprobs=True)  # type: ignore[arg-type]
    assert "Paris" in (whole.choices[0].message.content or "")
    assert whole.choices[0].logprobs is not None
    assert whole.choices[0].logprobs.content
    stream = client.chat.completions.create(
        model=model,
        messages=messages,
        max_tokens=12,
        temperature=0,
        stream=True,  # type: ignore[arg-type]
    )
    chunks = list(stream)
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == whole.choices[0].message.content
    reasons = [c.choices[0].finish_reason for c in chunks if c.choices and c.choices[0].finish_reason]
    assert reasons == [whole.choices[0].finish_reason]


def test_stop_string_ends_the_text_before_it(client: openai.OpenAI, model: str) -> None:
    answer = client.completions.create(
        model=model, prompt="1, 2, 3, 4, 5,", max_tokens=30, temperature=0, stop=["8, 9"]
    )
    assert answer.choices[0].finish_reason == "stop"
    assert answer.choices[0].text.strip().endswith("7,")


def test_errors_become_the_clients_exceptions(running: Mesh, client: openai.OpenAI, model: str) -> None:
    with pytest.raises(openai.BadRequestError, match="temperature"):
        client.completions.create(model=model, prompt="x", temperature=2.01)
    with pytest.raises(openai.BadRequestError, match="maximum context length"):
        client.completions.create(model=model, prompt=[1] * 9000)
    with pytest.raises(openai.NotFoundError, match="nope"):
        client.completions.create(model="nope", prompt="x")
    stranger = openai.OpenAI(base_url=f"{running.url}/v1", api_key="wrong", max_retries=0)
    with pytest.raises(openai.AuthenticationError), stranger:
        stranger.models.list()


def test_closing_a_stream_frees_everything(running: Mesh, client: openai.OpenAI, model: str) -> None:
    stream = client.completions.create(
        model=model, prompt="Count slowly:", max_tokens=400, stream=True, extra_body={"ignore_eos": True}
    )
    next(iter(stream))
    stream.close()
    running.wait_nothing_held()
