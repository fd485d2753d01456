"""`pdmesh.LLM`: what goes in, what comes out, and how it fails."""

from __future__ import annotations

import asyncio
import json
import shutil
import threading
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

from pdmesh import LLM, SamplingParams
from pdmesh.errors import ConfigError, InvalidRequest
from pdmesh.offline import PromptsFailed, RepetitionDetectionParams, RequestOutput, runs
from pdmesh.offline.prompts import read_prompts
from support.offline import SETTINGS

GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
TEXTS = ["The quick brown", "Tell me a story", "one two three"]


def texts_of(outputs: list[RequestOutput]) -> list[str]:
    return [output.outputs[0].text for output in outputs]


def test_greedy_tokens_are_those_of_transformers(llm: LLM, tiny: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from transformers import AutoModelForCausalLM

        reference = AutoModelForCausalLM.from_pretrained(tiny, dtype=torch.float32).eval()
    for output in llm.generate(TEXTS, GREEDY):
        ids = list(output.prompt_token_ids)
        for token_id in output.outputs[0].token_ids:
            with torch.inference_mode():
                assert int(reference(torch.tensor([ids])).logits[0, -1].argmax()) == token_id
            ids.append(token_id)


def test_every_form_of_a_prompt_means_the_same(llm: LLM) -> None:
    [ids] = [llm.get_tokenizer().encode(TEXTS[0])]
    wanted = llm.generate(TEXTS[0], GREEDY)
    assert [output.prompt for output in wanted] == [TEXTS[0]]
    for prompt in (ids, [TEXTS[0]], [ids], {"prompt": TEXTS[0]}, [{"prompt_token_ids": ids, "cache_salt": "s"}]):
        [output] = llm.generate(prompt, GREEDY)  # type: ignore[arg-type]
        assert output.outputs[0].token_ids == wanted[0].outputs[0].token_ids
        assert output.prompt_token_ids == ids
    assert llm.generate([], GREEDY) == []


def test_outputs_keep_the_order_of_prompts_of_any_length(llm: LLM) -> None:
    prompts = [[5 + number % 50] * (1 + 37 * number % 200) for number in range(40)]
    params = [SamplingParams(temperature=0, max_tokens=1 + number % 7, ignore_eos=True) for number in range(40)]
    outputs = llm.generate(prompts, params, use_tqdm=False)
    assert [output.prompt_token_ids for output in outputs] == prompts
    assert [len(output.outputs[0].token_ids) for output in outputs] == [each.max_tokens for each in params]
    assert len({output.request_id for output in outputs}) == 40
    assert all(output.finished and output.outputs[0].finish_reason == "length" for output in outputs)


def test_answers_of_one_prompt_share_its_prefill_and_differ(llm: LLM) -> None:
    prompt = list(range(10, 90))
    [output] = llm.generate(prompt, SamplingParams(n=4, seed=3, max_tokens=8, ignore_eos=True))
    assert [answer.index for answer in output.outputs] == [0, 1, 2, 3]
    assert len({tuple(answer.token_ids) for answer in output.outputs}) == 4
    again = llm.generate(prompt, SamplingParams(n=4, seed=3, max_tokens=8, ignore_eos=True))
    assert [answer.token_ids for answer in again[0].outputs] == [answer.token_ids for answer in output.outputs]
    # Full blocks but the last token's: it has to be computed for its logits.
    assert again[0].num_cached_tokens == 64


def test_a_reset_prefix_cache_finds_nothing_and_fills_again(llm: LLM) -> None:
    prompt = [77] * 70
    first, found = (llm.generate([prompt], GREEDY)[0] for _ in range(2))
    assert llm.reset_prefix_cache() is True
    anew, again = (llm.generate([prompt], GREEDY)[0] for _ in range(2))
    assert [each.num_cached_tokens for each in (first, found, anew, again)] == [0, 64, 0, 64]
    assert len({tuple(each.outputs[0].token_ids) for each in (first, found, anew, again)}) == 1


@pytest.mark.parametrize("priority", [1.5, True, "x", [1.5, 0], [0, True], ["x", 0], [1 << 63, 0]])
def test_a_priority_that_is_no_integer_is_refused(llm: LLM, priority: Any) -> None:
    """The core dropped such a request, and the call never returned."""
    with pytest.raises(InvalidRequest, match="priority"):
        llm.generate(TEXTS[:2], GREEDY, priority=priority)


def test_a_request_that_the_core_cannot_read_fails_alone(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever check is missing before it."""
    monkeypatch.setattr("pdmesh.offline.llm.check_integer", lambda *_: None)
    with pytest.raises(PromptsFailed) as failed:
        llm.generate(TEXTS[:2], GREEDY, priority=[1.5, 0])
    assert list(failed.value.errors) == [0]
    assert "cannot be sent to the engine: Expected `int`, got `float`" in failed.value.errors[0].message
    assert failed.value.outputs[1] is not None


def test_half_a_surrogate_pair_fails_its_prompt_alone(llm: LLM) -> None:
    """The other prompts' answers were lost with it."""
    with pytest.raises(PromptsFailed) as failed:
        llm.generate(["ok", "\ud800", "ok2"], GREEDY)
    assert [output is not None for output in failed.value.outputs] == [True, False, True]
    assert "prompt holds the lone surrogate '\\ud800'" in failed.value.errors[1].message
    with pytest.raises(InvalidRequest, match="lone surrogate"):
        llm.chat([{"role": "user", "content": "\udfff"}], GREEDY)


@pytest.mark.parametrize(
    "make",
    [
        lambda: SamplingParams(stop=["\ud800"]),
        lambda: SamplingParams(bad_words=["\ud800"]),
        lambda: SamplingParams(extra_args={"a": ["\ud800"]}),
        lambda: read_prompts({"prompt": "x", "cache_salt": "\ud800"}),
    ],
)
def test_half_a_surrogate_pair_in_a_parameter_is_refused(make: Any) -> None:
    with pytest.raises(InvalidRequest, match="lone surrogate"):
        make()


def test_a_prompt_that_makes_the_program_fail_fails_alone(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    check = runs.check_prompt

    def fail(token_ids: list[int], card: Any) -> None:
        if token_ids == [66]:
            raise KeyError("a bug")
        check(token_ids, card)

    monkeypatch.setattr(runs, "check_prompt", fail)
    with pytest.raises(PromptsFailed) as failed:
        llm.generate([[65], [66]], GREEDY)
    assert "this prompt made the program fail: KeyError" in failed.value.errors[1].message
    assert failed.value.outputs[0] is not None


def test_a_reset_that_cannot_be_done_is_refused(llm: LLM) -> None:
    assert llm.reset_prefix_cache(reset_running_requests=True)
    with pytest.raises(InvalidRequest, match="reset_connector: offline there is no KV tier"):
        llm.reset_prefix_cache(reset_connector=True)
    with pytest.raises(InvalidRequest, match="reset_running_requests must be True or False, got 'no'"):
        llm.reset_prefix_cache(reset_running_requests="no")  # type: ignore[arg-type]


def test_logprobs_are_in_vllms_form(llm: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True, logprobs=2, prompt_logprobs=1)
    [output] = llm.generate(TEXTS[0], params)
    answer = output.outputs[0]
    assert answer.logprobs is not None
    assert len(answer.logprobs) == 4
    for token_id, position in zip(answer.token_ids, answer.logprobs, strict=True):
        assert len(position) == 2
        assert position[token_id].rank == 1
        assert position[token_id].logprob == max(each.logprob for each in position.values())
    chosen = [position[token_id] for token_id, position in zip(answer.token_ids, answer.logprobs, strict=True)]
    assert answer.cumulative_logprob == pytest.approx(sum(each.logprob for each in chosen))
    assert "".join(each.decoded_token or "" for each in chosen) == answer.text
    assert output.prompt_logprobs is not None
    assert output.prompt_logprobs[0] is None
    for token_id, entry in zip(output.prompt_token_ids[1:], output.prompt_logprobs[1:], strict=True):
        assert entry is not None
        assert token_id in entry
        assert 1 <= len(entry) <= 2


def test_a_prompt_can_be_scored_without_generating(llm: LLM) -> None:
    [output] = llm.generate(TEXTS[0], SamplingParams(max_tokens=0, prompt_logprobs=0))
    assert output.outputs[0].token_ids == []
    assert output.prompt_logprobs is not None
    assert len(output.prompt_logprobs) == len(output.prompt_token_ids)


def test_text_ends_at_stop_strings_and_stop_tokens(llm: LLM) -> None:
    [free] = llm.generate(TEXTS[1], SamplingParams(temperature=0, max_tokens=20, ignore_eos=True))
    answer = free.outputs[0]
    stop = answer.text[5:8]
    [stopped] = llm.generate(TEXTS[1], SamplingParams(temperature=0, max_tokens=20, ignore_eos=True, stop=stop))
    assert stopped.outputs[0].text == answer.text[: answer.text.index(stop)]
    assert (stopped.outputs[0].finish_reason, stopped.outputs[0].stop_reason) == ("stop", stop)
    token = answer.token_ids[3]
    params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True, stop_token_ids=[token])
    [ended] = llm.generate(TEXTS[1], params)
    assert ended.outputs[0].stop_reason == token
    assert ended.outputs[0].token_ids == answer.token_ids[: answer.token_ids.index(token) + 1]


def test_without_detokenising_there_is_no_text(llm: LLM) -> None:
    [output] = llm.generate(TEXTS[0], SamplingParams(temperature=0, max_tokens=3, ignore_eos=True, detokenize=False))
    assert output.outputs[0].text == ""
    assert len(output.outputs[0].token_ids) == 3
    with pytest.raises(InvalidRequest, match="detokenize"):
        SamplingParams(detokenize=False, stop=["x"])


def test_repetition_ends_an_answer(llm: LLM) -> None:
    params = SamplingParams(
        temperature=0,
        max_tokens=50,
        allowed_token_ids=[9],
        repetition_detection=RepetitionDetectionParams(max_pattern_size=2, min_count=4),
    )
    assert llm.generate(TEXTS[0], params)[0].outputs[0].finish_reason == "repetition"


def test_chat_renders_with_the_models_template_or_another(llm: LLM) -> None:
    conversation = [{"role": "user", "content": "hello world"}]
    [output] = llm.chat(conversation, GREEDY)
    assert output.prompt == "<|im_start|>user\nhello world<|im_end|>\n<|im_start|>assistant\n"
    two = llm.chat([conversation, [*conversation, {"role": "assistant", "content": "a"}, *conversation]], GREEDY)
    assert two[0].outputs[0].token_ids == output.outputs[0].token_ids
    assert len(two) == 2
    [other] = llm.chat(
        conversation, GREEDY, chat_template="{{ messages[0].content }}!{{ mood }}", chat_template_kwargs={"mood": "?"}
    )
    assert other.prompt == "hello world!?"
    open_end = [*conversation, {"role": "assistant", "content": "Well"}]
    [continued] = llm.chat(open_end, GREEDY, add_generation_prompt=False, continue_final_message=True)
    assert continued.prompt is not None
    assert continued.prompt.endswith("assistant\nWell")
    with pytest.raises(InvalidRequest, match="continue_final_message"):
        llm.chat(open_end, GREEDY, continue_final_message=True)
    with pytest.raises(InvalidRequest, match=r"messages\[0\]\.role"):
        llm.chat([{"content": "x"}], GREEDY)
    with pytest.raises(ConfigError, match="compile"):
        llm.chat(conversation, GREEDY, chat_template="{% if %}")


def test_one_prompts_failure_does_not_lose_the_others(llm: LLM) -> None:
    with pytest.raises(PromptsFailed, match="2 of 4 prompts failed; prompt 1: This model's maximum context") as failed:
        llm.generate([TEXTS[0], [7] * 2000, TEXTS[1], {"prompt_token_ids": [99999]}], GREEDY)
    outputs = failed.value.outputs
    assert [output is None for output in outputs] == [False, True, False, True]
    assert isinstance(outputs[2], RequestOutput)
    assert outputs[2].outputs[0].text == texts_of(llm.generate(TEXTS[1], GREEDY))[0]
    assert set(failed.value.errors) == {1, 3}
    # A lone prompt's failure is raised as it is.
    with pytest.raises(InvalidRequest, match="out of vocabulary"):
        llm.generate([[99999]], GREEDY)


@pytest.mark.parametrize(
    ("prompts", "message"),
    [
        (5, "prompts must be a prompt or a list"),
        ([1, "x"], r"prompts\[0\] must be text, token ids or a dictionary, got int"),
        ({"text": "x"}, "unknown key 'text'"),
        ({}, "needs prompt or prompt_token_ids"),
        ({"prompt": 5}, "must be text, got int"),
        ([{"prompt_token_ids": ["a"]}], r"prompts\[0\]\['prompt_token_ids'\] must be a list of integers"),
        ({"prompt": "x", "cache_salt": "a/b"}, "cache_salt"),
    ],
)
def test_a_prompt_of_no_known_form_is_refused_before_anything_runs(prompts: Any, message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        read_prompts(prompts)


def test_lists_must_be_as_long_as_the_prompts(llm: LLM) -> None:
    with pytest.raises(InvalidRequest, match="sampling_params has 1 entries for 3 prompts"):
        llm.generate(TEXTS, [GREEDY])
    with pytest.raises(InvalidRequest, match="priority has 2 entries for 3 prompts"):
        llm.generate(TEXTS, GREEDY, priority=[1, 2])
    with pytest.raises(InvalidRequest, match="must be SamplingParams, got dict"):
        llm.generate(TEXTS, {"temperature": 0})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"temperature": -1}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"n": 2, "temperature": 0}, "n"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"min_tokens": 17}, "min_tokens"),
        ({"stop": ["a", "b", "c", "d", "e"]}, "stop"),
        ({"seed": 1 << 63}, "seed"),
        ({"seed": "x"}, "seed"),
        ({"logit_bias": {-1: 1.0}}, "logit_bias"),
        ({"logprobs": -2}, "logprobs"),
        ({"repetition_detection": {"max_pattern_size": 3, "min_count": 1}}, "repetition_detection"),
    ],
)
def test_parameters_are_checked_when_they_are_made(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        SamplingParams(**fields)
    assert refused.value.param is not None
    assert param in refused.value.param


def test_what_depends_on_the_model_is_checked_before_anything_runs(llm: LLM) -> None:
    with pytest.raises(InvalidRequest, match="out of vocabulary"):
        llm.generate(TEXTS, SamplingParams(stop_token_ids=[99999]))
    with pytest.raises(InvalidRequest, match="greater than max allowed: 20"):
        llm.generate(TEXTS, SamplingParams(logprobs=21))
    with pytest.raises(InvalidRequest, match="max_model_len"):
        llm.generate([TEXTS[0]], SamplingParams(max_tokens=5000))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_num_sequences": 4}, "unknown option max_num_sequences; the nearest is max_num_seqs"),
        ({"tensor_parallel_size": 2}, "tensor-parallel-size is a flag of vLLM's that is not here"),
        ({"port": 8000}, "option port is for services"),
        ({"gpu_memory_utilization": 2}, "gpu_memory_utilization: .*less than or equal to 1"),
        ({"max_num_seqs": 64, "max_num_batched_tokens": 8}, "max-num-batched-tokens 8 is less than max-num-seqs 64"),
    ],
)
def test_options_are_those_of_an_engine_and_wrong_ones_are_one_line(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as refused:
        LLM("nowhere", **options)
    assert "\n" not in refused.value.message


def test_a_model_that_is_not_there_leaves_nothing_behind(tmp_path: Path) -> None:
    num_threads = threading.active_count()
    with pytest.raises(ConfigError, match="does not exist"):
        LLM(str(tmp_path / "none"))
    assert threading.active_count() == num_threads


def test_default_parameters_come_from_the_models_generation_config(tiny: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(tiny, tmp_path / "model"))
    config = json.loads((folder / "generation_config.json").read_text())
    config |= {"temperature": 0.25, "top_p": 0.5, "top_k": 7, "repetition_penalty": 1.25, "max_new_tokens": 5}
    (folder / "generation_config.json").write_text(json.dumps(config))
    with LLM(str(folder), **SETTINGS) as opened:
        defaults = opened.get_default_sampling_params()
        assert (defaults.temperature, defaults.top_p, defaults.top_k) == (0.25, 0.5, 7)
        assert (defaults.repetition_penalty, defaults.max_tokens) == (1.25, 5)
        [output] = opened.generate(TEXTS[0])
        assert len(output.outputs[0].token_ids) <= 5


def test_it_works_inside_a_running_loop_and_from_several_threads(llm: LLM) -> None:
    wanted = texts_of(llm.generate(TEXTS, GREEDY))

    async def inside() -> list[str]:
        return texts_of(llm.generate(TEXTS, GREEDY))

    assert asyncio.run(inside()) == wanted
    found: dict[int, list[str]] = {}
    threads = [
        threading.Thread(target=lambda number=number: found.update({number: texts_of(llm.generate(TEXTS, GREEDY))}))
        for number in range(3)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert found == {0: wanted, 1: wanted, 2: wanted}
