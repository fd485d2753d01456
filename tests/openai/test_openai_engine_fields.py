"""vLLM's additions that an engine must know of: thinking budgets, repetition, extra arguments, priority, long messages."""

from __future__ import annotations

import json
from typing import Any

import pytest

from pdmesh.config import HttpConfig
from pdmesh.engine.sampling_limits import check_sampling
from pdmesh.errors import ConfigError, InvalidRequest
from pdmesh.openai.intake.size import num_listed_ids
from pdmesh.openai.intake.thinking import thinking_tokens
from pdmesh.openai.text import TextModel
from pdmesh.protocol.messages import RepetitionDetection, SamplingParams, ThinkingBudget
from pdmesh.protocol.wire import MAX_EXTRA_ARGS_BYTES
from support.api_server import ApiServer, api_server
from support.echo_generator import EchoGenerator
from support.sse import chunks_of

BASE = {"prompt": "The capital of France is", "max_tokens": 8}
THINKS = HttpConfig(reasoning_start_str="<think>", reasoning_end_str="</think>")


def sampling_of(server: ApiServer, **fields: Any) -> SamplingParams:
    answer = server.post("/v1/completions", {**BASE, **fields})
    assert answer.status_code == 200, answer.text
    return server.generator.requests[-1].sampling


def test_a_thinking_budget_reaches_the_engine_as_tokens(text: TextModel) -> None:
    with api_server(text, config=THINKS) as server:
        start, end = (text.encode(tag, add_special_tokens=False) for tag in ("<think>", "</think>"))
        for budget in (0, 5):
            thinking = sampling_of(server, thinking_token_budget=budget).thinking
            assert thinking == ThinkingBudget(budget=budget, start_token_ids=start, end_token_ids=end)
        assert sampling_of(server, thinking_token_budget=-1).thinking is None
        assert sampling_of(server).thinking is None
        chat = {"messages": [{"role": "user", "content": "x"}], "thinking_token_budget": 3}
        assert server.post("/v1/chat/completions", chat).status_code == 200
        asked = server.generator.requests[-1].sampling.thinking
        assert asked is not None
        assert asked.budget == 3


def test_a_thinking_budget_without_the_settings_is_a_400_that_names_them(shared_server: ApiServer) -> None:
    answer = shared_server.post("/v1/completions", {**BASE, "thinking_token_budget": 5})
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert error["param"] == "thinking_token_budget"
    assert "--reasoning-start-str and --reasoning-end-str" in error["message"]


def test_a_section_without_tokens_is_refused_at_the_start() -> None:
    class NoTokens:
        def encode(self, text: str, add_special_tokens: bool) -> list[int]:
            return []

    with pytest.raises(ConfigError, match="reasoning-start-str '<think>' has no tokens"):
        thinking_tokens(THINKS, NoTokens())  # type: ignore[arg-type]


def test_repetition_detection_reaches_the_engine(shared_server: ApiServer) -> None:
    asked = {"max_pattern_size": 4, "min_pattern_size": 2, "min_count": 3}
    assert sampling_of(shared_server, repetition_detection=asked).repetition_detection == RepetitionDetection(**asked)
    assert (
        sampling_of(shared_server, repetition_detection={"max_pattern_size": 0, "min_count": 1}).repetition_detection
        is None
    )


@pytest.mark.parametrize("stream", [False, True])
def test_an_output_that_repeated_itself_says_so_as_in_vllm(text: TextModel, stream: bool) -> None:
    class Repeating(EchoGenerator):
        def _said(self, request: Any) -> tuple[list[int], str, int | None]:
            return self.reply * 2, "repetition", None

    with api_server(text, Repeating()) as server:
        answer = server.post("/v1/completions", {**BASE, "stream": stream})
    choice = chunks_of(answer.text.split("\n\n"))[-1]["choices"][0] if stream else answer.json()["choices"][0]
    assert (choice["finish_reason"], choice["stop_reason"]) == ("repetition", "repetition_detected")
    if not stream:
        assert choice["text"] == text.decode(EchoGenerator().reply * 2), "the repeating tokens are text"


def test_extra_arguments_reach_the_engine_as_they_are(shared_server: ApiServer) -> None:
    args = {"big": 2**64 - 1, "small": -(2**63), "real": 0.5, "name": "é", "yes": True, "list": [1, 2.5, "x"]}
    assert sampling_of(shared_server, vllm_xargs=args).extra_args == args


def test_extra_arguments_count_in_the_size_of_a_request(shared_server: ApiServer) -> None:
    assert num_listed_ids(SamplingParams(extra_args={"x": "y" * 4000})) >= 1000
    body = {"prompt": ["a"] * 1024, "max_tokens": 1, "vllm_xargs": {"x": "y" * (MAX_EXTRA_ARGS_BYTES - 100)}}
    answer = shared_server.post("/v1/completions", {**body, "n": 2})
    assert answer.status_code == 400
    assert "vllm_xargs" in answer.json()["error"]["message"]


def test_priorities_of_64_bits_reach_the_engine(shared_server: ApiServer) -> None:
    for priority in (2**63 - 1, -(2**63), 0):
        shared_server.post("/v1/completions", {**BASE, "priority": priority})
        assert shared_server.generator.requests[-1].priority == priority


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"repetition_detection": RepetitionDetection(max_pattern_size=-1)}, "repetition_detection", "got -1"),
        (
            {"repetition_detection": RepetitionDetection(max_pattern_size=2, min_pattern_size=3)},
            "repetition_detection",
            "min_pattern_size must be between 0 and 2, got 3",
        ),
        (
            {"repetition_detection": RepetitionDetection(max_pattern_size=2, min_count=1)},
            "repetition_detection",
            "min_count must be between 2",
        ),
        (
            {"thinking": ThinkingBudget(budget=-1, start_token_ids=[1], end_token_ids=[2])},
            "thinking_token_budget",
            "got -1",
        ),
        (
            {"thinking": ThinkingBudget(budget=1, start_token_ids=[], end_token_ids=[2])},
            "thinking_token_budget",
            "must have tokens",
        ),
        ({"extra_args": {"x": "y" * MAX_EXTRA_ARGS_BYTES}}, "vllm_xargs", "at most 16384 bytes"),
    ],
)
def test_an_engine_refuses_the_same_of_whoever_speaks_to_it(fields: dict[str, Any], param: str, words: str) -> None:
    with pytest.raises(InvalidRequest, match=words) as caught:
        check_sampling(SamplingParams(**fields))
    assert caught.value.param == param


def test_an_engine_accepts_the_edges_of_the_ranges() -> None:
    check_sampling(
        SamplingParams(
            repetition_detection=RepetitionDetection(max_pattern_size=1, min_pattern_size=1),
            thinking=ThinkingBudget(budget=0, start_token_ids=[1], end_token_ids=[2]),
            extra_args={"x": 2**64 - 1},
        )
    )
    check_sampling(SamplingParams(repetition_detection=RepetitionDetection(max_pattern_size=0, min_count=0)))


@pytest.mark.parametrize("per_message", [1, 2, 3, 5, 50])
def test_several_tokens_in_a_message_are_the_same_answer_in_order(text: TextModel, per_message: int) -> None:
    """What an engine with a stream_interval sends: order, text, the end with the last text, usage."""
    generator = EchoGenerator(reply=[504, 3575, 282, 4649, 28, 1077], tokens_per_delta=per_message)
    body = {**BASE, "n": 3, "max_tokens": 7, "return_token_ids": True, "stream": True, "logprobs": 0}
    with api_server(text, generator) as server:
        answer = server.post("/v1/completions", {**body, "stream_options": {"include_usage": True}})
        whole = server.post("/v1/completions", {**body, "stream": False}).json()
    *chunks, usage = chunks_of(answer.text.split("\n\n"))
    for index in range(3):
        mine = [chunk["choices"][0] for chunk in chunks if chunk["choices"][0]["index"] == index]
        assert "".join(choice["text"] for choice in mine) == whole["choices"][index]["text"]
        assert [token for choice in mine for token in choice["token_ids"]] == [*generator.reply, 2]
        assert [choice["finish_reason"] for choice in mine] == [None] * (len(mine) - 1) + ["stop"]
        assert len([token for choice in mine for token in choice["logprobs"]["tokens"]]) == 7
    assert usage["usage"] == whole["usage"]
    assert usage["usage"]["completion_tokens"] == 21


@pytest.mark.parametrize("per_message", [1, 3, 50])
def test_a_stop_string_inside_a_message_ends_the_choice_there(text: TextModel, per_message: int) -> None:
    reply = text.encode(" one two three four", add_special_tokens=False)
    with api_server(text, EchoGenerator(reply=reply, tokens_per_delta=per_message)) as server:
        choice = server.post("/v1/completions", {**BASE, "stop": "three"}).json()["choices"][0]
    assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == (" one two ", "stop", "three")


def test_stream_interval_of_a_single_request_is_refused_by_name(shared_server: ApiServer) -> None:
    answer = shared_server.post("/v1/completions", {**BASE, "stream_interval": 4})
    assert answer.status_code == 400
    assert "--stream-interval" in json.dumps(answer.json())
