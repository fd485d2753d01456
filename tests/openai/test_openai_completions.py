"""/v1/completions through real sockets and the real client."""

import pytest

from pdmesh.openai.text import TextModel
from support.api_server import ApiServer, api_server
from support.echo_generator import EchoGenerator
from support.sse import chunks_of, stream_frames

REPLY = "The capital of France"
PROMPT = "Which city is it?"


def test_a_completion_has_text_usage_and_route(shared_server: ApiServer) -> None:
    with shared_server.client() as client:
        raw = client.completions.with_raw_response.create(model="echo", prompt=PROMPT, temperature=0)
    answer = raw.parse()
    assert answer.choices[0].text == REPLY
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens, answer.usage.total_tokens) == (5, 5, 10)
    assert answer.id.startswith("cmpl-")
    assert answer.system_fingerprint.startswith("pdmesh-")
    route = raw.headers["x-pdmesh-route"]
    assert route == "prefill=prefill-0; decode=decode-0; reason=test; kv=shm; kv_bytes=1024; cached=0"


def test_the_whole_answer_has_every_key_of_vllm(shared_server: ApiServer) -> None:
    answer = shared_server.post("/v1/completions", {"prompt": PROMPT, "max_tokens": 2}).json()
    assert set(answer) == {
        *("id", "object", "created", "model", "choices", "service_tier", "system_fingerprint", "usage"),
        "kv_transfer_params",
    }
    assert set(answer["choices"][0]) == {
        *("index", "text", "logprobs", "finish_reason", "stop_reason", "token_ids", "prompt_logprobs"),
        "prompt_token_ids",
    }
    assert answer["choices"][0]["finish_reason"] == "length"


def test_golden_stream_frames(shared_server: ApiServer) -> None:
    frames = stream_frames(shared_server, "/v1/completions", {"prompt": PROMPT, "max_tokens": 2})
    assert frames[-1] == "data: [DONE]"
    assert frames[-2].startswith(": pdmesh prefill=prefill-0; decode=decode-0; reason=test; kv=shm; kv_bytes=1024")
    chunks = chunks_of(frames)
    assert [chunk["choices"][0]["text"] for chunk in chunks] == ["The", " capital"]
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks] == [None, "length"]
    assert all("usage" not in chunk for chunk in chunks)
    assert "system_fingerprint" not in chunks[0]
    assert "system_fingerprint" in chunks[1]


def test_catalogue_10_11_usage_only_where_it_was_asked_for(shared_server: ApiServer) -> None:
    base = {"prompt": PROMPT, "max_tokens": 2}
    assert not any(
        "usage" in c for c in chunks_of(stream_frames(shared_server, "/v1/completions", {**base, "stream_options": {}}))
    )
    once = chunks_of(
        stream_frames(shared_server, "/v1/completions", {**base, "stream_options": {"include_usage": True}})
    )
    assert ["usage" in chunk for chunk in once] == [False, False, True]
    assert once[-1]["choices"] == []
    assert once[-1]["usage"] == {
        "prompt_tokens": 5,
        "total_tokens": 7,
        "completion_tokens": 2,
        "prompt_tokens_details": {"cached_tokens": 0},
    }
    options = {"include_usage": True, "continuous_usage_stats": True}
    always = chunks_of(stream_frames(shared_server, "/v1/completions", {**base, "stream_options": options}))
    assert [chunk["usage"]["completion_tokens"] for chunk in always] == [1, 2, 2]


def test_catalogue_44_prompts_times_n_choices_are_numbered(shared_server: ApiServer) -> None:
    with shared_server.client() as client:
        answer = client.completions.create(model="echo", prompt=["one", "two"], n=2, max_tokens=2)
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    frames = chunks_of(
        stream_frames(shared_server, "/v1/completions", {"prompt": ["one", "two"], "n": 2, "max_tokens": 2})
    )
    texts: dict[int, str] = {}
    ends: dict[int, int] = {}
    for chunk in frames:
        for choice in chunk["choices"]:
            texts[choice["index"]] = texts.get(choice["index"], "") + choice["text"]
            ends[choice["index"]] = ends.get(choice["index"], 0) + (choice["finish_reason"] is not None)
    assert texts == dict.fromkeys(range(4), "The capital")
    # Catalogue 13: exactly one finish_reason per choice.
    assert ends == dict.fromkeys(range(4), 1)


@pytest.mark.parametrize("prompt", [[504, 3575], [[504, 3575]], "The capital", ["The capital"]])
def test_prompts_in_all_four_forms_reach_the_engine_as_ids(text: TextModel, prompt: object) -> None:
    with api_server(text) as server:
        assert server.post("/v1/completions", {"prompt": prompt}).status_code == 200
        assert server.generator.requests[0].token_ids == [504, 3575]


@pytest.mark.parametrize("tokens_per_delta", [1, 3])
@pytest.mark.parametrize("stream", [False, True])
def test_catalogue_4_a_stop_string_across_tokens_is_cut_before_it(
    text: TextModel, stream: bool, tokens_per_delta: int
) -> None:
    reply = text.encode(" 5, 6, 7, 8, 9")
    with api_server(text, EchoGenerator(reply=reply, tokens_per_delta=tokens_per_delta)) as server:
        body = {"prompt": "1, 2, 3, 4,", "stop": ["6, 7"], "max_tokens": 32}
        if stream:
            chunks = chunks_of(stream_frames(server, "/v1/completions", body))
            choices = [chunk["choices"][0] for chunk in chunks]
            said = "".join(choice["text"] for choice in choices)
            assert "6" not in said
            last = choices[-1]
        else:
            last = server.post("/v1/completions", body).json()["choices"][0]
            said = last["text"]
        assert said == " 5, "
        assert (last["finish_reason"], last["stop_reason"]) == ("stop", "6, 7")
        assert server.generator.aborted_choices == [(server.generator.requests[0].request_id, 0)]
        # The generator came to its own end; only the choice was stopped.
        assert server.generator.aborted == []
        kept = server.post("/v1/completions", {**body, "include_stop_str_in_output": True}).json()
        assert kept["choices"][0]["text"] == " 5, 6, 7"


def test_a_stop_string_ends_one_choice_only_and_counts_its_tokens(text: TextModel) -> None:
    with api_server(text, EchoGenerator(reply=text.encode(" a b c d"))) as server:
        answer = server.post("/v1/completions", {"prompt": "x", "stop": " c", "n": 2, "max_tokens": 9}).json()
    assert [choice["text"] for choice in answer["choices"]] == [" a b", " a b"]
    assert answer["usage"]["completion_tokens"] == 6


def test_stop_reasons_of_eos_and_stop_token_ids(shared_server: ApiServer) -> None:
    eos = shared_server.post("/v1/completions", {"prompt": PROMPT}).json()["choices"][0]
    assert (eos["text"], eos["stop_reason"]) == (REPLY, None)
    by_id = shared_server.post("/v1/completions", {"prompt": PROMPT, "stop_token_ids": [282]}).json()["choices"][0]
    assert (by_id["text"], by_id["finish_reason"], by_id["stop_reason"]) == ("The capital", "stop", 282)
    kept = shared_server.post(
        "/v1/completions", {"prompt": PROMPT, "stop_token_ids": [282], "include_stop_str_in_output": True}
    ).json()
    assert kept["choices"][0]["text"] == "The capital of"


def test_min_tokens_delays_stop_strings(text: TextModel) -> None:
    with api_server(text, EchoGenerator(reply=text.encode(" a b a b"))) as server:
        answer = server.post("/v1/completions", {"prompt": "x", "stop": " a", "min_tokens": 2, "max_tokens": 9}).json()
    assert answer["choices"][0]["text"] == " a b"


def test_catalogue_1_no_replacement_characters_and_whole_characters(text: TextModel) -> None:
    said = "日本é🙂🦙"
    with api_server(text, EchoGenerator(reply=text.encode(said))) as server:
        body = {"prompt": "x", "max_tokens": 40, "logprobs": 0}
        chunks = chunks_of(stream_frames(server, "/v1/completions", body))
        pieces = [chunk["choices"][0]["text"] for chunk in chunks]
        tokens = [token for chunk in chunks for token in chunk["choices"][0]["logprobs"]["tokens"]]
        assert "".join(pieces) == said
        assert "\ufffd" not in "".join(tokens)
        # The last token is EOS, whose text only logprobs show.
        assert "".join(tokens[:-1]) == said
        # Cut inside a character: its beginning is not shown.
        cut = server.post("/v1/completions", {"prompt": "x", "max_tokens": len(text.encode("日本é🙂")) + 1}).json()
        assert cut["choices"][0]["text"] == "日本é🙂"


@pytest.mark.parametrize("prompt", ["a  b", [504, 3575]])
@pytest.mark.parametrize("stream", [False, True])
def test_catalogue_33_35_echo_with_logprobs_covers_prompt_and_completion(
    shared_server: ApiServer, prompt: object, stream: bool
) -> None:
    body = {"prompt": prompt, "echo": True, "logprobs": 2, "max_tokens": 2, "temperature": 0}
    if stream:
        parts = [chunk["choices"][0] for chunk in chunks_of(stream_frames(shared_server, "/v1/completions", body))]
        said = "".join(part["text"] for part in parts)
        logprobs = {key: [x for part in parts for x in part["logprobs"][key]] for key in parts[0]["logprobs"]}
        num_prompt = len(parts[0]["logprobs"]["tokens"]) - 1
    else:
        answer = shared_server.post("/v1/completions", body).json()
        said, logprobs = answer["choices"][0]["text"], answer["choices"][0]["logprobs"]
        num_prompt = answer["usage"]["prompt_tokens"]
    assert len(logprobs["tokens"]) == num_prompt + 2
    assert "".join(logprobs["tokens"]) == said
    assert logprobs["token_logprobs"][0] is None
    assert logprobs["top_logprobs"][0] is None
    assert all(value == -0.5 for value in logprobs["token_logprobs"][1:])
    assert logprobs["text_offset"] == [sum(map(len, logprobs["tokens"][:i])) for i in range(len(logprobs["tokens"]))]
    assert all(2 <= len(top) <= 3 for top in logprobs["top_logprobs"][1:])


def test_catalogue_32_echo_with_max_tokens_0_generates_nothing(shared_server: ApiServer) -> None:
    body = {"prompt": "a  b", "echo": True, "max_tokens": 0, "logprobs": 1}
    answer = shared_server.post("/v1/completions", body).json()
    assert answer["choices"][0]["text"] == "a  b"
    assert answer["choices"][0]["logprobs"]["token_logprobs"][0] is None
    assert answer["usage"]["completion_tokens"] == 0


@pytest.mark.parametrize("stream", [False, True])
def test_an_echo_alone_asks_no_engine(text: TextModel, stream: bool) -> None:
    """Engines have no request without a token: `echo` with `max_tokens: 0` and no logprobs was a 400 in a real mesh."""
    body = {"prompt": ["a  b", "c"], "echo": True, "max_tokens": 0, "n": 2}
    with api_server(text) as server:
        if stream:
            choices = [chunk["choices"][0] for chunk in chunks_of(stream_frames(server, "/v1/completions", body))]
        else:
            answer = server.post("/v1/completions", body)
            choices = answer.json()["choices"]
            assert answer.json()["usage"]["completion_tokens"] == 0
            assert "reason=nothing_to_generate" in answer.headers["x-pdmesh-route"]
        said = [(choice["index"], choice["text"], choice["finish_reason"]) for choice in choices]
        assert sorted(said) == [
            (0, "a  b", "length"),
            (1, "a  b", "length"),
            (2, "c", "length"),
            (3, "c", "length"),
        ]
        assert server.generator.requests == []


def test_a_stop_string_in_the_delta_that_max_tokens_ends_is_a_stop(text: TextModel) -> None:
    reply = text.encode(" a b c d")
    with api_server(text, EchoGenerator(reply=reply, tokens_per_delta=4)) as server:
        body = {"prompt": "x", "stop": " c", "max_tokens": 4, "logprobs": 0, "return_token_ids": True}
        answer = server.post("/v1/completions", body).json()
        [choice] = answer["choices"]
        assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == (" a b", "stop", " c")
        # Tokens, logprobs and usage end alike: with the token that completed the stop string.
        assert choice["token_ids"] == reply[:3]
        assert len(choice["logprobs"]["tokens"]) == answer["usage"]["completion_tokens"] == 3
        # The engine has ended the choice itself: there is nothing to stop.
        assert server.generator.aborted_choices == []
        kept = server.post("/v1/completions", {**body, "include_stop_str_in_output": True}).json()["choices"][0]
        assert (kept["text"], kept["token_ids"]) == (" a b c", reply[:3])


def test_null_is_the_default_of_every_field(text: TextModel) -> None:
    """Where the default is true, null was false: chat lost its generation prompt, echo showed special tokens."""
    with api_server(text) as server:
        chat = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 1}
        server.post("/v1/chat/completions", chat)
        server.post("/v1/chat/completions", {**chat, "add_generation_prompt": None, "add_special_tokens": None})
        first, second = server.generator.requests
        assert first.token_ids == second.token_ids
        echo = {"prompt": [1, 504, 2], "echo": True, "max_tokens": 0, "skip_special_tokens": None}
        assert server.post("/v1/completions", echo).json()["choices"][0]["text"] == "The"


def test_echo_of_every_choice_waits_for_the_prompts_logprobs(shared_server: ApiServer) -> None:
    body = {"prompt": "a b", "echo": True, "logprobs": 0, "n": 3, "max_tokens": 1}
    answer = shared_server.post("/v1/completions", body).json()
    assert {"".join(choice["logprobs"]["tokens"]) for choice in answer["choices"]} == {"a bThe"}


def test_prompt_logprobs_have_vllms_form(shared_server: ApiServer) -> None:
    body = {"prompt": [504, 3575], "prompt_logprobs": 1, "max_tokens": 1}
    entries = shared_server.post("/v1/completions", body).json()["choices"][0]["prompt_logprobs"]
    assert entries[0] is None
    assert entries[1] == {"3575": {"logprob": -0.5, "rank": 1, "decoded_token": " capital"}}


def test_token_ids_and_tokens_as_ids(shared_server: ApiServer) -> None:
    body = {"prompt": [504], "max_tokens": 2, "logprobs": 0, "return_token_ids": True}
    choice = shared_server.post("/v1/completions", {**body, "return_tokens_as_token_ids": True}).json()["choices"][0]
    assert choice["token_ids"] == [504, 3575]
    assert choice["prompt_token_ids"] == [504]
    assert choice["logprobs"]["tokens"] == ["token_id:504", "token_id:3575"]
    chunks = chunks_of(stream_frames(shared_server, "/v1/completions", body))
    assert [chunk["choices"][0]["prompt_token_ids"] for chunk in chunks] == [[504], None]
    assert [chunk["choices"][0]["token_ids"] for chunk in chunks] == [[504], [3575]]


def test_catalogue_38_nan_logprobs_fail_that_request(text: TextModel) -> None:
    with api_server(text, EchoGenerator(nan=True)) as server:
        failed = server.post("/v1/completions", {"prompt": "x", "logprobs": 1})
        assert failed.status_code == 500
        assert "NaN" in failed.json()["error"]["message"]
        assert server.post("/v1/completions", {"prompt": "x"}).status_code == 200


def test_catalogue_67_equal_request_ids_are_told_apart_inside(text: TextModel) -> None:
    with api_server(text) as server:
        answers = [server.post("/v1/completions", {"prompt": "x", "request_id": "dup"}).json() for _ in range(2)]
        assert {answer["id"] for answer in answers} == {"cmpl-dup"}
        assert len({request.request_id for request in server.generator.requests}) == 2
        named = server.post("/v1/completions", {"prompt": "x", "request_id": "b"}, {"X-Request-Id": "abc-123"})
        assert named.json()["id"] == "cmpl-abc-123"
        assert named.headers["x-request-id"] == "abc-123"
        assert server.generator.requests[-1].request_id.startswith("cmpl-abc-123-0-")


def test_a_seed_is_drawn_where_none_is_given(text: TextModel) -> None:
    with api_server(text) as server:
        for seed in (None, None, -1, 7, -(2**63)):
            server.post("/v1/completions", {"prompt": "x", "seed": seed})
        seeds = [request.sampling.seed for request in server.generator.requests]
        server.post("/v1/completions", {"prompt": ["x", "x"]})
        twins = [request.sampling.seed for request in server.generator.requests[-2:]]
    assert len(set(seeds[:3])) == 3
    assert len(set(twins)) == 2
    assert seeds[3:] == [7, -(2**63)]


def test_sampling_reaches_the_engine_resolved(text: TextModel) -> None:
    with api_server(text) as server:
        body = {
            "prompt": "x",
            "temperature": 0.001,
            "top_k": -1,
            "top_p": None,
            "logit_bias": {"5": 1000, "6": -1000},
            "stop_token_ids": [3, 3],
            "bad_words": ["Paris"],
            "max_tokens": 4.0,
            "best_of": 1,
            "n": None,
        }
        assert server.post("/v1/completions", body).status_code == 200
        sampling = server.generator.requests[0].sampling
        assert (sampling.temperature, sampling.top_k, sampling.top_p, sampling.max_tokens) == (0.01, 0, 1.0, 4)
        assert sampling.logit_bias == {5: 100.0, 6: -100.0}
        assert sampling.stop_token_ids == [3]
        assert sampling.bad_words_token_ids == [
            text.encode("Paris", add_special_tokens=False),
            text.encode(" Paris", add_special_tokens=False),
        ]
        server.post("/v1/completions", {"prompt": "x", "temperature": 1e-6, "top_k": 5})
        greedy = server.generator.requests[1].sampling
        assert (greedy.temperature, greedy.top_k) == (0.0, 0)


def test_catalogue_28_output_is_clamped_to_the_context(text: TextModel) -> None:
    with api_server(text, EchoGenerator(max_model_len=64)) as server:
        answer = server.post(
            "/v1/completions", {"prompt": [504] * 61, "max_tokens": 60, "min_tokens": 50, "ignore_eos": True}
        )
        assert answer.status_code == 200, answer.text
        assert answer.json()["usage"]["completion_tokens"] == 3
        assert answer.json()["choices"][0]["finish_reason"] == "length"


@pytest.mark.parametrize(("keep", "side", "kept"), [(2, None, [3, 4]), (2, "right", [1, 2]), (-1, None, [1, 2, 3, 4])])
def test_truncate_prompt_tokens(text: TextModel, keep: int, side: str | None, kept: list[int]) -> None:
    with api_server(text) as server:
        body = {"prompt": [1, 2, 3, 4], "truncate_prompt_tokens": keep, "truncation_side": side}
        assert server.post("/v1/completions", body).status_code == 200
        assert server.generator.requests[0].token_ids == kept


def test_cached_tokens_are_counted_once_per_prompt(text: TextModel) -> None:
    with api_server(text, EchoGenerator(cached_tokens=3)) as server:
        answer = server.post("/v1/completions", {"prompt": ["a b c d e", "a b c d e"], "n": 3})
    assert answer.json()["usage"]["prompt_tokens_details"] == {"cached_tokens": 6}
    assert answer.headers["x-pdmesh-route"].endswith("cached=6")


def test_unknown_fields_are_ignored_and_counted(text: TextModel) -> None:
    with api_server(text) as server:
        assert server.post("/v1/completions", {"prompt": "x", "nonsense": 1, "user": "me"}).status_code == 200
        metrics = server.raw("GET", "/metrics").text
        assert "pdmesh_api_unknown_fields_total 1.0" in metrics
        assert 'http_requests_total{handler="/v1/completions",method="POST",status="2xx"} 1.0' in metrics
        assert 'pdmesh_api_requests_total{outcome="ok"} 1.0' in metrics
