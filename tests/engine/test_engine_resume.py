"""A choice that was resumed or preempted gets the tokens and the log-probabilities of one that was never interrupted."""

import random
from collections.abc import Sequence

import pytest

from pdmesh.protocol.messages import TokenLogprobs
from support.core_harness import CoreHarness
from support.fake_backend import EOS, VOCAB_SIZE

MAX_TOKENS = 14


def prompt_of(length: int, seed: int = 0) -> list[int]:
    generator = random.Random(f"{seed}/{length}")
    return [generator.randrange(2, VOCAB_SIZE) for _ in range(length)]


PROMPT = prompt_of(10)


def run_whole(prompt: list[int] = PROMPT, **options: object) -> CoreHarness:
    core = CoreHarness()
    core.add(prompt, **options)
    core.run()
    return core


# What an ordinary run gives, so that every edit below changes something.
PLAIN = {"temperature": 0.8, "seed": 4, "max_tokens": MAX_TOKENS, "logprobs": 3, "ignore_eos": True}


def plain_tokens() -> list[int]:
    core = run_whole(**PLAIN)
    tokens = core.tokens()
    core.close()
    return tokens


TOKENS = plain_tokens()
CASES: dict[str, dict[str, object]] = {
    "nothing": {},
    "greedy": {"temperature": 0.0},
    "min_tokens before a stop id": {"min_tokens": 9, "stop_token_ids": [TOKENS[2], TOKENS[5]]},
    "stop id": {"stop_token_ids": [TOKENS[10]]},
    "end of sequence": {"ignore_eos": False, "logit_bias": {EOS: 2.0}, "min_tokens": 5},
    "repetition": {"repetition_penalty": 1.6},
    "frequency and presence": {"frequency_penalty": 1.1, "presence_penalty": 0.6, "temperature": 0.0},
    "bad word": {"bad_words_token_ids": [[TOKENS[3]]]},
    # It begins with a token before the interruption and ends behind it.
    "bad words over several tokens": {"bad_words_token_ids": [TOKENS[3:5], TOKENS[6:9]]},
    "allowed": {"allowed_token_ids": list(range(2, 30)), "repetition_penalty": 1.3},
    "no log-probabilities": {"logprobs": None},
    "all at once": {
        "repetition_penalty": 1.2,
        "presence_penalty": 0.4,
        "frequency_penalty": 0.3,
        "bad_words_token_ids": [TOKENS[1:3], [TOKENS[7]]],
        "min_tokens": 6,
        "stop_token_ids": [TOKENS[0], TOKENS[9]],
        "logit_bias": {TOKENS[4]: 1.5},
        "top_k": 30,
        "top_p": 0.95,
        "logprobs": 0,
    },
}


def logprobs_of(core: CoreHarness, request_id: str = "r") -> list[TokenLogprobs]:
    return [each for delta in core.deltas_of(request_id) for each in delta.logprobs]


def assert_equal(got: Sequence[TokenLogprobs], expected: Sequence[TokenLogprobs]) -> None:
    assert [each.token_ids for each in got] == [each.token_ids for each in expected]
    assert [each.rank for each in got] == [each.rank for each in expected]
    for one, other in zip(got, expected, strict=True):
        assert one.logprobs == pytest.approx(other.logprobs, abs=1e-6)


@pytest.mark.parametrize("case", CASES)
def test_resuming_anywhere_changes_nothing(case: str) -> None:
    options = PLAIN | CASES[case]
    whole = run_whole(**options)
    tokens = whole.tokens()
    assert len(logprobs_of(whole)) == (0 if options["logprobs"] is None else len(tokens))
    for position in range(1, len(tokens)):
        resumed = CoreHarness()
        resumed.add(PROMPT, emitted=[tokens[:position]], **options)
        resumed.run()
        assert tokens[:position] + resumed.tokens() == tokens, position
        assert_equal(logprobs_of(resumed), logprobs_of(whole)[position:])
        last, expected = resumed.deltas_of()[-1], whole.deltas_of()[-1]
        assert (last.finish_reason, last.stop_token_id) == (expected.finish_reason, expected.stop_token_id)
        resumed.close()


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("enable_prefix_caching", [True, False])
def test_preemption_changes_nothing(case: str, enable_prefix_caching: bool) -> None:
    options = PLAIN | CASES[case]
    core = CoreHarness(num_blocks=10, max_model_len=40, enable_prefix_caching=enable_prefix_caching)
    # The others push it out, again and again, as it is the last to arrive.
    for at in range(2):
        core.add(prompt_of(9, at + 1), f"other {at}", max_tokens=24)
    core.add(PROMPT, **options)
    core.run()
    whole = run_whole(**options)
    assert core.scheduler.state.counters.num_preemptions > 0
    assert core.tokens() == whole.tokens()
    assert_equal(logprobs_of(core), logprobs_of(whole))
    last, expected = core.deltas_of()[-1], whole.deltas_of()[-1]
    assert (last.finish_reason, last.stop_token_id) == (expected.finish_reason, expected.stop_token_id)


@pytest.mark.parametrize("position", [1, 6, 11])
def test_a_resumed_choice_may_be_preempted(position: int) -> None:
    options = PLAIN | CASES["all at once"] | {"stop_token_ids": [], "logprobs": 2}
    whole = run_whole(**options)
    tokens = whole.tokens()
    core = CoreHarness(num_blocks=10, max_model_len=40, enable_prefix_caching=False)
    for at in range(2):
        core.add(prompt_of(9, at + 1), f"other {at}", max_tokens=24)
    core.add(PROMPT, emitted=[tokens[:position]], **options)
    core.run()
    assert core.scheduler.state.counters.num_preemptions > 0
    assert tokens[:position] + core.tokens() == tokens
    assert_equal(logprobs_of(core), logprobs_of(whole)[position:])


def test_prompt_logprobs_survive_preemption_and_come_once() -> None:
    options = PLAIN | {"prompt_logprobs": 2}
    prompt = prompt_of(18)
    expected = run_whole(prompt, **options).deltas_of()[0].prompt_logprobs
    assert expected is not None
    core = CoreHarness(num_blocks=10, max_model_len=40, max_num_batched_tokens=6)
    for at in range(2):
        core.add(prompt_of(5, at + 1), f"other {at}", max_tokens=20)
    core.add(prompt, **options)
    core.run()
    assert core.scheduler.state.counters.num_preemptions > 0
    got = core.deltas_of()[0].prompt_logprobs
    assert got is not None
    assert got[0] is None
    assert_equal([each for each in got if each], [each for each in expected if each])
    assert sum(delta.prompt_logprobs is not None for delta in core.deltas_of()) == 1


def test_every_case_changes_what_it_is_about() -> None:
    unlike = {name for name in CASES if run_whole(**PLAIN | CASES[name]).tokens() != TOKENS}
    assert set(CASES) - unlike == {"nothing", "no log-probabilities"}
