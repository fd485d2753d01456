"""`use_beam_search` over HTTP: what comes back, and what does not go together with it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from pdmesh.openai.text import TextModel
from support.api_server import make_app, serve_in_thread
from support.table_generator import TableGenerator, random_table

VOCAB_SIZE = 600
BASE = {"prompt": [504, 3575], "use_beam_search": True, "n": 3, "max_tokens": 4}


@pytest.fixture(scope="module")
def served(text: TextModel) -> Iterator[tuple[httpx.Client, TableGenerator]]:
    # Few tokens are likely, so that beams differ in more than their last one; the prompt's ids need a real vocabulary.
    generator = TableGenerator(table=random_table(3, VOCAB_SIZE, spread=4.0), vocab_size=text.vocab_size)
    with serve_in_thread(make_app(text, generator)) as url, httpx.Client(base_url=url, verify=False) as client:
        yield client, generator


def test_choices_are_beams_best_first(served: tuple[httpx.Client, TableGenerator]) -> None:
    client, generator = served
    answer = client.post("/v1/completions", json=BASE | {"logprobs": 2, "return_token_ids": True, "length_penalty": 0})
    assert answer.status_code == 200, answer.text
    body = answer.json()
    assert [choice["index"] for choice in body["choices"]] == [0, 1, 2]
    sums = [sum(choice["logprobs"]["token_logprobs"]) for choice in body["choices"]]
    assert sums == sorted(sums, reverse=True)
    for choice in body["choices"]:
        assert choice["finish_reason"] == "length"
        # The chosen token and the two most likely ones, which may be the same.
        assert all(2 <= len(top) <= 3 for top in choice["logprobs"]["top_logprobs"])
        context = [*BASE["prompt"]]
        for token, logprob in zip(choice["token_ids"], choice["logprobs"]["token_logprobs"], strict=True):
            assert logprob == pytest.approx(float(generator.table(context)[token]))
            context.append(token)
    assert len({tuple(choice["token_ids"]) for choice in body["choices"]}) == 3
    assert body["usage"]["prompt_tokens"] == 2
    assert body["usage"]["completion_tokens"] == 12
    route = answer.headers["x-pdmesh-route"]
    assert "reason=beam_search" in route
    assert "decode=table-0" in route


def test_a_beam_that_ended_keeps_its_last_token_out_of_the_text(text: TextModel) -> None:
    eos = text.eos_token_ids[0]

    def table(context: list[int]) -> Any:
        logprobs = random_table(1, VOCAB_SIZE)(context) - 20
        logprobs[[504, eos][len(context) > 2]] = 0
        return logprobs

    generator = TableGenerator(table=table, vocab_size=text.vocab_size)
    with serve_in_thread(make_app(text, generator)) as url, httpx.Client(base_url=url, verify=False) as client:
        body = client.post("/v1/completions", json=BASE | {"n": 1, "return_token_ids": True}).json()
        [choice] = body["choices"]
        assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", None)
        assert choice["token_ids"] == [504, eos]
        assert choice["text"] == text.decode([504])
        goes_on = client.post("/v1/completions", json=BASE | {"n": 1, "ignore_eos": True}).json()
        assert goes_on["choices"][0]["finish_reason"] == "length"


def test_several_prompts_and_chat(served: tuple[httpx.Client, TableGenerator]) -> None:
    client, _ = served
    body = client.post("/v1/completions", json=BASE | {"prompt": [[504, 3575], [282]], "echo": True}).json()
    assert [choice["index"] for choice in body["choices"]] == list(range(6))
    assert body["choices"][0]["text"] != body["choices"][3]["text"]
    alone = client.post("/v1/completions", json=BASE | {"prompt": [282], "echo": True}).json()
    assert [choice["text"] for choice in body["choices"][3:]] == [choice["text"] for choice in alone["choices"]]
    chat = {
        "messages": [{"role": "user", "content": "hi"}],
        "use_beam_search": True,
        "n": 2,
        "max_tokens": 3,
        "logprobs": True,
        "temperature": 0,
    }
    said = client.post("/v1/chat/completions", json=chat)
    assert said.status_code == 200, said.text
    assert len(said.json()["choices"]) == 2
    assert len(said.json()["choices"][0]["logprobs"]["content"]) == 3


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *[("stream", True), ("stop", ["x"]), ("stop_token_ids", [5]), ("min_tokens", 1), ("prompt_logprobs", 1)],
        *[("presence_penalty", 0.5), ("frequency_penalty", -1), ("repetition_penalty", 1.2), ("bad_words", ["x"])],
        *[("logit_bias", {"5": 1}), ("allowed_token_ids", [5]), ("vllm_xargs", {"a": 1})],
        *[("n", value) for value in (0, 501)],
        *[("length_penalty", value) for value in (17, -16.5, "1")],
        *[("temperature", 3), ("top_p", 0), ("use_beam_search", 1), ("max_tokens", 0)],
    ],
)
def test_what_does_not_go_with_beam_search_is_refused_by_name(
    served: tuple[httpx.Client, TableGenerator], field: str, value: Any
) -> None:
    answer = served[0].post("/v1/completions", json=BASE | {field: value})
    assert answer.status_code == 400, answer.text
    assert field in answer.json()["error"]["param"]


def test_echoed_logprobs_and_lonely_penalties_are_refused(served: tuple[httpx.Client, TableGenerator]) -> None:
    client, _ = served
    answer = client.post("/v1/completions", json=BASE | {"echo": True, "logprobs": 1})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "prompt_logprobs")
    answer = client.post("/v1/completions", json={"prompt": [504], "length_penalty": 0.5})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "length_penalty")
    zero = client.post("/v1/completions", json=BASE | {"echo": True, "max_tokens": 0})
    assert (zero.status_code, zero.json()["error"]["param"]) == (400, "max_tokens")


def test_what_only_shapes_a_draw_has_no_effect(served: tuple[httpx.Client, TableGenerator]) -> None:
    client, _ = served
    plain = client.post("/v1/completions", json=BASE).json()["choices"]
    shaped = client.post("/v1/completions", json=BASE | {"temperature": 0, "top_p": 0.1, "top_k": 1, "seed": 4}).json()
    assert shaped["choices"] == plain
