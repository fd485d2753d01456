"""Events made from a choice's frame are, byte for byte, those made from whole chunks."""

from types import SimpleNamespace
from typing import Any

import pytest

from pdmesh.openai.answer.base import Answer, AnswerHead, event
from pdmesh.openai.answer.chat import ChatAnswer
from pdmesh.openai.answer.completion import CompletionAnswer
from pdmesh.openai.run.choice import ChoiceUpdate
from pdmesh.openai.schemas import ChatBody, CompletionBody

HEAD = AnswerHead(id='cmpl-"text":""', created=1, model='m\\"content":""', fingerprint="f")
TEXTS = ["a", "", '"', '"text":""', "\\", "\n\u2028é你😀", "\x00\x7f", "x" * 3000]


def answer(kind: str, **fields: Any) -> Answer:
    run: Any = SimpleNamespace(
        num_choices=2,
        prompts=[SimpleNamespace(request=SimpleNamespace(token_ids=[1, 2]), prompt=SimpleNamespace(text="p"))],
        usage=lambda: None,
    )
    text: Any = None
    if kind == "completion":
        return CompletionAnswer(HEAD, CompletionBody(prompt="p", stream=True, **fields), run, text)
    body = ChatBody(messages=[{"role": "user", "content": "p"}], stream=True, **fields)
    return ChatAnswer(HEAD, body, run, text, role="assistant", opening="")


def updates() -> list[ChoiceUpdate]:
    plain = [
        ChoiceUpdate(index=index, prompt_index=0, text=text, token_ids=[7], logprobs=None)
        for text in TEXTS
        for index in (0, 1)
    ]
    ends = [
        ChoiceUpdate(index=index, prompt_index=0, text="z", token_ids=[8], logprobs=None, finish_reason="length")
        for index in (0, 1)
    ]
    return [*plain, *ends]


@pytest.mark.parametrize("fields", [{}, {"return_token_ids": True}, {"stream_options": {"include_usage": True}}])
@pytest.mark.parametrize("kind", ["completion", "chat"])
def test_events_are_those_of_whole_chunks(kind: str, fields: dict[str, Any]) -> None:
    quick, plain = answer(kind, **fields), answer(kind, **fields)
    for update in updates():
        assert quick.events(update) == b"".join(event(chunk) for chunk in plain.chunks(update))
    assert bool(quick._frames) == ("return_token_ids" not in fields)
