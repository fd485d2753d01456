"""The core's loop over a backend whose tokens show every mistake in the block tables."""

import math
import random

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pdmesh.engine.messages import Abort, ReleaseOffer
from pdmesh.errors import InternalError
from support.core_harness import CoreHarness, make_add
from support.fake_backend import EOS, VOCAB_SIZE, expected_tokens, logits_after


def prompt_of(length: int, seed: int = 0) -> list[int]:
    generator = random.Random(f"{seed}/{length}")
    return [generator.randrange(2, VOCAB_SIZE) for _ in range(length)]


@pytest.mark.parametrize("length", [1, 3, 4, 5, 8, 9, 63, 64, 65, 130])
@pytest.mark.parametrize("budget", [1, 3, 64, 512])
def test_tokens_do_not_depend_on_chunks(length: int, budget: int) -> None:
    core = CoreHarness(max_num_batched_tokens=budget)
    core.add(prompt_of(length), max_tokens=9)
    core.run()
    assert core.tokens() == expected_tokens(prompt_of(length), 9)
    assert core.finish_reason() == "length"
    assert core.num_used == 0
    assert max(len(step.token_ids) for step in core.backend.steps) <= budget


@pytest.mark.parametrize("enable_prefix_caching", [True, False])
def test_prefix_hits_change_no_token(enable_prefix_caching: bool) -> None:
    core = CoreHarness(enable_prefix_caching=enable_prefix_caching)
    shared = prompt_of(21)
    for index, tail in enumerate(([], [5], [5, 6, 7, 8, 9, 10], [9])):
        core.add(shared + tail, f"r{index}")
        core.run()
        assert core.tokens(f"r{index}") == expected_tokens(shared + tail, 8)
    hits = [core.deltas_of(f"r{index}")[0].cached_tokens for index in range(4)]
    assert hits == ([0, 20, 20, 20] if enable_prefix_caching else [0, 0, 0, 0])
    assert core.deltas_of("r1")[0].kv_source == ("prefix" if enable_prefix_caching else "")


def test_generated_tokens_are_cached_for_the_next_turn() -> None:
    core = CoreHarness()
    core.add(prompt_of(10), "first", max_tokens=12)
    core.run()
    conversation = prompt_of(10) + core.tokens("first") + [7, 7]
    core.add(conversation, "second")
    core.run()
    assert core.tokens("second") == expected_tokens(conversation, 8)
    # The last generated token's KV was never computed: 21 tokens are 5 full blocks.
    assert core.deltas_of("second")[0].cached_tokens == 20


def test_a_whole_cached_prompt_still_computes_its_last_block() -> None:
    core = CoreHarness()
    for request_id in ("first", "second"):
        core.add(prompt_of(16), request_id)
        core.run()
    assert core.tokens("second") == core.tokens("first")
    assert core.deltas_of("second")[0].cached_tokens == 12


@pytest.mark.parametrize("num_blocks", [10, 14, 20])
def test_preemption_changes_no_token(num_blocks: int) -> None:
    core = CoreHarness(num_blocks=num_blocks, max_model_len=40)
    for index in range(5):
        core.add(prompt_of(9, index), f"r{index}", max_tokens=20)
    core.run()
    for index in range(5):
        assert core.tokens(f"r{index}") == expected_tokens(prompt_of(9, index), 20)
    assert core.scheduler.state.counters.num_preemptions > 0
    assert core.num_used == 0


def test_a_batch_gives_each_request_what_it_gets_alone() -> None:
    core = CoreHarness(num_blocks=256, max_num_seqs=5)
    lengths = [1, 2, 7, 8, 30, 31, 33, 100]
    options = {"temperature": 0.9, "top_k": 20, "top_p": 0.9, "presence_penalty": 0.5, "repetition_penalty": 1.2}
    for length in lengths:
        core.add(prompt_of(length), f"r{length}", seed=length, max_tokens=12, **options)
    core.run()
    for length in lengths:
        alone = CoreHarness(max_num_batched_tokens=5)
        alone.add(prompt_of(length), seed=length, max_tokens=12, **options)
        alone.run()
        assert alone.tokens() == core.tokens(f"r{length}")


def test_choices_share_the_prompt_and_differ_by_noise() -> None:
    core = CoreHarness()
    core.add(prompt_of(14), n=3, temperature=1.0, seed=5)
    core.run()
    assert len({tuple(core.tokens(choice=choice)) for choice in range(3)}) == 3
    assert [core.deltas_of(choice=choice)[0].cached_tokens for choice in range(3)] == [0, 13, 13]
    # The first step computes the prompt once; the second brings the others' tails.
    assert [len(step.context_len) for step in core.backend.steps[:2]] == [1, 3]


def test_further_choices_start_when_the_first_is_aborted() -> None:
    core = CoreHarness(max_num_batched_tokens=4)
    core.add(prompt_of(14), n=3)
    core.send(Abort(request_id="r", choice=0))
    core.run()
    assert core.finish_reason(choice=0) == "abort"
    assert core.tokens(choice=1) == core.tokens(choice=2) == expected_tokens(prompt_of(14), 8)


@pytest.mark.parametrize("position", [1, 2, 5, 7])
@pytest.mark.parametrize("temperature", [0.0, 1.3])
def test_resuming_gives_the_same_tokens(position: int, temperature: float) -> None:
    options = {"temperature": temperature, "seed": 3, "frequency_penalty": 0.7, "repetition_penalty": 1.1}
    options |= {"bad_words_token_ids": [[4, 9]], "min_tokens": 6, "ignore_eos": False, "stop_token_ids": [13]}
    whole = CoreHarness()
    whole.add(prompt_of(10), max_tokens=12, **options)
    whole.run()
    resumed = CoreHarness()
    emitted = whole.tokens()[:position]
    resumed.add(prompt_of(10), max_tokens=12, emitted=[emitted], **options)
    resumed.run()
    assert emitted + resumed.tokens() == whole.tokens()
    assert resumed.finish_reason() == whole.finish_reason()


def test_resuming_after_the_last_token_only_says_so() -> None:
    core = CoreHarness()
    core.add(prompt_of(10), max_tokens=2, n=2, emitted=[[5, 6], [5]])
    core.run()
    assert (core.tokens(choice=0), core.finish_reason(choice=0)) == ([], "length")
    assert core.tokens(choice=1) == expected_tokens([*prompt_of(10), 5], 1)


def test_eos_and_stop_ids_end_a_choice() -> None:
    core = CoreHarness()
    prompt = next(p for p in (prompt_of(6, seed) for seed in range(500)) if expected_tokens(p, 1) == [EOS])
    core.add(prompt, "eos", ignore_eos=False)
    core.add(prompt, "ignored", max_tokens=2)
    second = expected_tokens(prompt, 2)[1]
    core.add(prompt, "stop", stop_token_ids=[second])
    core.run()
    [eos] = core.deltas_of("eos")
    assert (eos.finish_reason, eos.token_ids, eos.stop_token_id) == ("stop", [EOS], None)
    assert core.tokens("ignored") == [EOS, second]
    stop = core.deltas_of("stop")[-1]
    assert (stop.finish_reason, stop.stop_token_id) == ("stop", second)


def test_the_context_limit_ends_a_choice() -> None:
    core = CoreHarness(max_model_len=12)
    core.add(prompt_of(10), max_tokens=50)
    core.run()
    assert core.tokens() == expected_tokens(prompt_of(10), 2)
    assert core.finish_reason() == "length"


@pytest.mark.parametrize("budget", [3, 64])
def test_prompt_logprobs_come_once_with_the_first_delta(budget: int) -> None:
    core = CoreHarness(max_num_batched_tokens=budget)
    prompt = prompt_of(11)
    core.add(prompt, "warm")
    core.run()
    core.add(prompt, prompt_logprobs=2, max_tokens=3, logprobs=1)
    core.run()
    first, *rest = core.deltas_of()
    assert first.prompt_logprobs is not None
    assert first.prompt_logprobs[0] is None
    for position in range(1, 11):
        entry = first.prompt_logprobs[position]
        expected = logits_after(prompt[:position]).log_softmax(-1)
        assert entry.token_ids[0] == prompt[position]
        assert entry.logprobs[0] == pytest.approx(expected[prompt[position]].item(), abs=1e-5)
        assert entry.token_ids[1] == int(expected.argmax())
        assert len(entry.token_ids) == 3
    assert all(delta.prompt_logprobs is None for delta in rest)
    assert core.tokens() == expected_tokens(prompt, 3)
    assert [len(delta.logprobs) for delta in core.deltas_of()] == [1, 1, 1]


def test_prompt_logprobs_alone_generate_nothing() -> None:
    core = CoreHarness()
    core.add(prompt_of(11), prompt_logprobs=0, max_tokens=0)
    core.run()
    [delta] = core.deltas_of()
    assert (delta.token_ids, delta.finish_reason, len(delta.prompt_logprobs or [])) == ([], "length", 11)


def test_nan_logits_end_one_choice_and_are_not_cached() -> None:
    # Its first chunks are named before the NaN shows.
    core = CoreHarness(max_num_batched_tokens=4)
    core.backend.nan_tokens = {7}
    bad, good = [*prompt_of(8)[:7], 7], [8 if token == 7 else token for token in prompt_of(9)]
    core.add(bad, "bad", max_tokens=1)
    core.add(good, "good", max_tokens=1)
    core.run()
    assert core.deltas_of("bad")[-1].error_code == "EngineFault"
    assert core.tokens("good") == expected_tokens(good, 1)
    assert core.outputs[-1].stats.nan_requests == 1
    core.backend.nan_tokens = set()
    core.add(bad, "again", max_tokens=1)
    core.run()
    assert core.deltas_of("again")[0].cached_tokens == 0


def test_a_failed_step_ends_its_requests_and_nothing_else() -> None:
    core = CoreHarness()
    core.backend.fail_next = 1
    core.add(prompt_of(5), "bad")
    core.run()
    [delta] = core.deltas_of("bad")
    assert (delta.finish_reason, delta.error_code) == ("error", "EngineFault")
    assert "on fire" in delta.error_message
    assert core.num_used == 0
    core.add(prompt_of(5), "good")
    core.run()
    assert core.tokens("good") == expected_tokens(prompt_of(5), 8)


def test_the_third_failed_step_in_a_row_ends_the_core() -> None:
    core = CoreHarness(max_num_seqs=1)
    core.backend.fail_next = 3
    for index in range(4):
        core.add(prompt_of(5), f"r{index}")
    with pytest.raises(InternalError, match="3 steps in a row"):
        core.run()
    assert [core.finish_reason(f"r{index}") for index in range(3)] == ["error"] * 3


@pytest.mark.parametrize(
    ("options", "param"),
    [
        ({"prompt": []}, "prompt"),
        ({"prompt": [VOCAB_SIZE]}, "prompt"),
        ({"prompt": [-1]}, "prompt"),
        ({"prompt": [2] * 200}, "prompt"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"stop_token_ids": [9999]}, "stop_token_ids"),
        ({"logit_bias": {9999: 1.0}}, "logit_bias"),
        ({"allowed_token_ids": []}, "allowed_token_ids"),
        ({"emitted": [[1], [2]]}, "emitted"),
        ({"choices": [0, 0]}, "n"),
        ({"choices": [1 << 32]}, "n"),
        ({"prompt": [2, 1 << 63]}, "prompt"),
        ({"n": 0, "choices": [0]}, "n"),
        ({"temperature": -0.1}, "temperature"),
        ({"temperature": 2.1}, "temperature"),
        ({"top_p": 0.0}, "top_p"),
        ({"top_p": 1.1}, "top_p"),
        ({"top_k": -2}, "top_k"),
        ({"min_p": 5.0}, "min_p"),
        ({"min_p": -0.1}, "min_p"),
        ({"presence_penalty": 2.1}, "presence_penalty"),
        ({"frequency_penalty": -2.1}, "frequency_penalty"),
        ({"repetition_penalty": 0.0}, "repetition_penalty"),
        ({"seed": 1 << 63}, "seed"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"min_tokens": 9}, "min_tokens"),
        ({"min_tokens": -1}, "min_tokens"),
        ({"logprobs": -5}, "logprobs"),
        ({"logprobs": 1001}, "logprobs"),
        ({"prompt_logprobs": -7}, "prompt_logprobs"),
        ({"logit_bias": {3: 101.0}}, "logit_bias"),
        ({"bad_words_token_ids": [[]]}, "bad_words"),
        *(
            ({field: wrong}, field)
            for wrong in (math.nan, math.inf, -math.inf)
            for field in ("temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty")
        ),
        *(({"logit_bias": {3: wrong}}, "logit_bias") for wrong in (math.nan, math.inf, -math.inf)),
    ],
)
def test_bad_requests_are_refused_and_others_go_on(options: dict[str, object], param: str) -> None:
    core = CoreHarness()
    core.add(prompt_of(5), "good")
    core.add(**{"prompt": [2, 3], "request_id": "bad"} | options)  # type: ignore[arg-type]
    core.run()
    delta = next(delta for delta in core.deltas if delta.request_id == "bad")
    assert (delta.error_code, delta.error_param, delta.finish_reason) == ("InvalidRequest", param, "error")
    assert core.tokens("good") == expected_tokens(prompt_of(5), 8)


def test_a_request_that_cannot_even_be_checked_is_answered() -> None:
    core = CoreHarness()
    broken = make_add([2], n=2)
    core.send(msgspec.structs.replace(broken, request=msgspec.structs.replace(broken.request, token_ids=None)))
    core.add(prompt_of(5), "good")
    core.run()
    assert [core.deltas_of(choice=choice)[0].error_code for choice in (0, 1)] == ["InternalError"] * 2
    assert core.tokens("good") == expected_tokens(prompt_of(5), 8)


anything = st.floats() | st.sampled_from([0.0, 1.0, 1e-9, 1e308, 5e-324, 2.0, -2.0])
counts = st.integers(-3, 70) | st.sampled_from([-(1 << 63), (1 << 64) - 1])


@settings(max_examples=150)
@given(
    floats=st.dictionaries(
        st.sampled_from(
            ["temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty"]
        ),
        anything,
    ),
    integers=st.dictionaries(
        st.sampled_from(["top_k", "seed", "max_tokens", "min_tokens", "logprobs", "prompt_logprobs"]), counts
    ),
    logit_bias=st.dictionaries(counts, anything, max_size=3),
)
def test_whatever_the_parameters_are_a_request_is_served_or_its_client_is_told(
    floats: dict[str, float], integers: dict[str, int], logit_bias: dict[int, float]
) -> None:
    core = CoreHarness(max_model_len=30)
    core.add(prompt_of(5), "good")
    core.add(prompt_of(6), "any", **floats, **integers, logit_bias=logit_bias)
    core.run()
    assert core.tokens("good") == expected_tokens(prompt_of(5), 8)
    last = core.deltas_of("any")[-1]
    assert last.finish_reason == "length" or last.error_code == "InvalidRequest", last.error_message
    core.close()


@pytest.mark.parametrize("wrong", [{"min_p": 5.0, "temperature": 1.0}, {"logprobs": -5}, {"prompt_logprobs": -7}])
def test_a_row_that_cannot_be_sampled_ends_alone(wrong: dict[str, float], monkeypatch: pytest.MonkeyPatch) -> None:
    """Once, it took all requests of its step along, and after three such steps the engine."""
    monkeypatch.setattr("pdmesh.engine.admission.check_request", lambda add, limits: None)
    core = CoreHarness()
    core.add(prompt_of(5), "good", max_tokens=8)
    for index in range(4):
        core.add(prompt_of(6 + index), f"bad{index}", **wrong)
    core.run()
    assert {core.deltas_of(f"bad{index}")[-1].error_code for index in range(4)} == {"EngineFault"}
    assert core.tokens("good") == expected_tokens(prompt_of(5), 8)
    assert core.num_used == 0


def test_a_request_too_many_is_told_to_come_back() -> None:
    core = CoreHarness(max_num_queued_reqs=2)
    for index in range(3):
        core.add(prompt_of(5), f"r{index}")
    core.run()
    assert core.deltas_of("r2")[0].error_code == "Overloaded"
    assert core.finish_reason("r1") == "length"


def test_a_contradictory_request_ends_alone() -> None:
    core = CoreHarness()
    core.add(prompt_of(5), allowed_token_ids=[EOS], min_tokens=3, ignore_eos=False)
    core.run()
    assert core.deltas_of()[0].error_code == "InvalidRequest"


@pytest.mark.parametrize("n", [1, 3])
def test_prefill_only_hands_off_after_one_token_and_keeps_the_prompt(n: int) -> None:
    core = CoreHarness()
    core.add(prompt_of(10), n=n, temperature=1.0, prefill_only=True, offer_id="offer", store_to_tier=True)
    core.run()
    for choice in range(n):
        [delta] = core.deltas_of(choice=choice)
        assert (len(delta.token_ids), delta.finish_reason) == (1, "")
    [sealed] = core.sealed
    assert (sealed.offer_id, sealed.num_tokens, len(sealed.groups[0].block_ids)) == ("offer", 10, 3)
    assert sealed.groups[0].generations == core.pool.generations_of(sealed.groups[0].block_ids)
    [computed] = core.computed
    assert computed.blocks.block_ids == sealed.groups[0].block_ids[:2]
    assert len(computed.keys) == 2
    assert core.num_used == 3
    core.run(ReleaseOffer(offer_id="offer"))
    assert core.num_used == 0


def test_prefill_only_says_when_the_first_token_is_the_last() -> None:
    core = CoreHarness()
    core.add(prompt_of(10), prefill_only=True, max_tokens=1, offer_id="offer")
    core.run()
    assert core.finish_reason() == "length"
    assert core.num_used == 3


def test_an_offer_released_before_it_is_sealed_never_is() -> None:
    core = CoreHarness()
    core.add(prompt_of(10), prefill_only=True, offer_id="offer")
    core.send(ReleaseOffer(offer_id="offer"))
    core.run()
    assert not core.sealed
    assert core.num_used == 0


def test_each_step_sends_one_message_and_rest_is_silent() -> None:
    core = CoreHarness()
    core.add(prompt_of(10), max_tokens=5)
    said = core.run()
    assert len(said) == len(core.backend.steps) + 1
    assert core.outputs[-1].stats.num_running == 0
    assert core.outputs[-1].stats.steps == 5


def test_the_states_are_looked_through_once_nothing_has_happened_for_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    """Right behind a prompt, other processes need the cores to go on with it: handoffs had been a millisecond longer."""
    core = CoreHarness()
    inbox, happened = core._inbox, []
    plain_wait = inbox.wait

    def wait(descriptors: list[int], timeout_s: float | None = None) -> bool:
        is_first = timeout_s is not None and "woken" not in happened
        if is_first:
            core.add([10, 11], "second", max_tokens=2)
            happened.append("woken")
            return True
        return plain_wait(descriptors, timeout_s)

    monkeypatch.setattr(inbox, "wait", wait)
    monkeypatch.setattr(type(core.scheduler.state), "check_integrity", lambda self: happened.append("checked"))
    core.add([20, 21], "first", max_tokens=2)
    core.run()
    # The last is the harness's own.
    assert happened == ["woken", "checked", "checked"]
    assert core.tokens("second") == expected_tokens([10, 11], 2)
