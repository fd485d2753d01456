"""What the soak asks for: some hundred short requests, drawn from a seed, and the answers one engine alone gives to them."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any

from pdmesh.offline import LLM, SamplingParams
from support.offline import SETTINGS

# Of the tiny model: ids below are special, and it has a few hundred in all.
FIRST_PLAIN_TOKEN = 4
NUM_PLAIN_TOKENS = 300
PREFIX_TOKENS = (33, 64, 100, 170, 257, 400, 600)
"""Lengths of what prompts share; with steps of 256 tokens the longest take several chunks."""
MAX_TOKENS = (1, 2, 3, 6, 12, 24, 24, 48, 96, 160)
WORDS = ("sea", "old", "town", "wind", "Größe", "你好", "story", "dog", "quick", "42", "привет", "lazy", "capital")


@dataclass(frozen=True, kw_only=True)
class Choice:
    """One answer of a request."""

    token_ids: tuple[int, ...]
    text: str
    finish_reason: str | None
    stop_reason: int | str | None


@dataclass(frozen=True, kw_only=True)
class Shape:
    """One request, and what must come of it."""

    number: int
    path: str
    body: dict[str, Any] = field(repr=False)
    choices: tuple[Choice, ...] = ()
    num_prompt_tokens: int = 0

    @property
    def num_completion_tokens(self) -> int:
        return sum(len(choice.token_ids) for choice in self.choices)


def draw_shapes(seed: int, count: int) -> list[Shape]:
    """Draw requests: greedy and seeded, one or two choices, prompts that share beginnings and prompts that do not, chats."""
    rng = random.Random(seed)
    prefixes = [_tokens(rng, length) for length in PREFIX_TOKENS for _ in range(2)]
    return [_draw(rng, number, prefixes) for number in range(count)]


def _draw(rng: random.Random, number: int, prefixes: list[list[int]]) -> Shape:
    body: dict[str, Any] = {"max_tokens": rng.choice(MAX_TOKENS), "ignore_eos": rng.random() < 0.7, "temperature": 0}
    if rng.random() < 0.5:
        body |= {"temperature": rng.choice((0.7, 1.0, 1.3)), "seed": rng.randrange(1 << 40)}
        body |= rng.choice(({}, {"top_p": 0.9}, {"top_k": 20}, {"min_p": 0.02}, {"frequency_penalty": 0.5}))
        if rng.random() < 0.3:
            body["n"] = 2
    if rng.random() < 0.15:
        body["repetition_penalty"] = 1.2
    if rng.random() < 0.12:
        content = " ".join(rng.choice(WORDS) for _ in range(rng.randrange(3, 60)))
        return Shape(number=number, path="/v1/chat/completions", body=body | {"messages": _message(content)})
    shared = rng.choice(prefixes) if rng.random() < 0.7 else []
    body["prompt"] = [*shared, *_tokens(rng, rng.randrange(1, 40))]
    return Shape(number=number, path="/v1/completions", body=body)


def _tokens(rng: random.Random, length: int) -> list[int]:
    return [rng.randrange(FIRST_PLAIN_TOKEN, NUM_PLAIN_TOKENS) for _ in range(length)]


def _message(content: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": content}]


def with_answers(model: str, shapes: list[Shape], seed: int) -> list[Shape]:
    """Have one engine answer them all; every fifth gets a stop string out of the middle of its own answer."""
    rng = random.Random(seed)
    with LLM(model, **SETTINGS) as engine:
        answered = _answer(engine, shapes)
        stopping = [_stopping(rng, shape) if shape.number % 5 == 0 else shape for shape in answered]
        return _answer(engine, stopping)


def _stopping(rng: random.Random, shape: Shape) -> Shape:
    text = shape.choices[0].text
    if len(text) < 6:
        return shape
    begin = rng.randrange(1, len(text) - 3)
    body = shape.body | {"stop": [text[begin : begin + rng.choice((1, 2, 3))]]}
    return Shape(number=shape.number, path=shape.path, body=body)


def _answer(engine: LLM, shapes: list[Shape]) -> list[Shape]:
    answers: dict[int, Any] = {}
    completions = [shape for shape in shapes if "prompt" in shape.body]
    chats = [shape for shape in shapes if "messages" in shape.body]
    outputs = engine.generate([s.body["prompt"] for s in completions], _params(completions), use_tqdm=False)
    outputs += engine.chat([s.body["messages"] for s in chats], _params(chats), use_tqdm=False) if chats else []
    answers = {shape.number: output for shape, output in zip([*completions, *chats], outputs, strict=True)}
    return [
        Shape(
            number=shape.number,
            path=shape.path,
            body=shape.body,
            num_prompt_tokens=len(answers[shape.number].prompt_token_ids),
            choices=tuple(
                Choice(
                    token_ids=tuple(each.token_ids),
                    text=each.text,
                    finish_reason=each.finish_reason,
                    stop_reason=each.stop_reason,
                )
                for each in answers[shape.number].outputs
            ),
        )
        for shape in shapes
    ]


def _params(shapes: list[Shape]) -> list[SamplingParams]:
    return [
        SamplingParams(**{name: value for name, value in shape.body.items() if name not in ("prompt", "messages")})
        for shape in shapes
    ]
