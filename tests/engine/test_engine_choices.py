"""Many choices of one prompt: the prompt and its KV exist once, who waits costs nothing, and all get their own tokens."""

import random

import pytest

from pdmesh.connector.shm import ShmConnector
from pdmesh.engine.messages import Abort
from pdmesh.protocol.messages import KVSource
from pdmesh.security import MeshSecret
from support.core_harness import CoreHarness, make_add
from support.fake_backend import VOCAB_SIZE, expected_tokens

SECRET = MeshSecret("x" * 32)
OPTIONS = {"temperature": 1.1, "seed": 9}


def prompt_of(length: int) -> list[int]:
    generator = random.Random(length)
    return [generator.randrange(2, VOCAB_SIZE) for _ in range(length)]


def alone(prompt: list[int], choice: int, *, max_tokens: int = 8, **options: object) -> list[int]:
    """Return what a choice gets in an engine of its own."""
    core = CoreHarness()
    core.add(prompt, choices=[choice], n=choice + 1, max_tokens=max_tokens, **OPTIONS | options)
    core.run()
    return core.tokens(choice=choice)


@pytest.mark.parametrize("enable_prefix_caching", [True, False])
@pytest.mark.parametrize("length", [1, 3, 4, 5, 16, 18, 63])
def test_further_choices_compute_one_token_of_the_prompt(length: int, enable_prefix_caching: bool) -> None:
    core = CoreHarness(enable_prefix_caching=enable_prefix_caching)
    prompt = prompt_of(length)
    core.add(prompt, n=4, max_tokens=6, **OPTIONS)
    core.run()
    for choice in range(4):
        assert core.tokens(choice=choice) == alone(prompt, choice, max_tokens=6)
    assert [core.deltas_of(choice=choice)[0].cached_tokens for choice in range(4)] == [0] + 3 * [length - 1]
    assert [len(step.token_ids) for step in core.backend.steps[:2]] == [length, 4]
    assert core.num_used == 0


@pytest.mark.parametrize("enable_prefix_caching", [True, False])
@pytest.mark.parametrize("num_blocks", [10, 12, 16, 24])
@pytest.mark.parametrize("watermark_blocks", [0, 2])
def test_choices_that_lack_room_get_the_same_tokens(
    num_blocks: int, enable_prefix_caching: bool, watermark_blocks: int
) -> None:
    core = CoreHarness(
        num_blocks=num_blocks,
        enable_prefix_caching=enable_prefix_caching,
        max_model_len=40,
        watermark_blocks=watermark_blocks,
    )
    for length in (9, 12):
        core.add(prompt_of(length), f"r{length}", n=6, max_tokens=16, **OPTIONS)
    core.run()
    for length in (9, 12):
        for choice in range(6):
            assert core.tokens(f"r{length}", choice) == alone(prompt_of(length), choice, max_tokens=16)
    assert core.num_used == 0
    assert core.scheduler.state.num_held == 0


@pytest.mark.parametrize("enable_prefix_caching", [True, False])
@pytest.mark.parametrize("length", [4, 18])
def test_all_choices_of_a_ticket_use_the_pulled_kv(length: int, enable_prefix_caching: bool) -> None:
    prefill, decode = (
        CoreHarness(connectors={"shm": ShmConnector(peer_id, SECRET)}, enable_prefix_caching=enable_prefix_caching)
        for peer_id in ("p@1", "d@1")
    )
    decode.reach(prefill, "p@1")
    prompt = prompt_of(length)
    prefill.add(prompt, n=5, prefill_only=True, offer_id="offer", **OPTIONS)
    prefill.run()
    [sealed] = prefill.sealed
    emitted = [prefill.tokens(choice=choice) for choice in range(5)]
    source = KVSource(transfer_id="t", peer_id="p@1", groups=sealed.groups, num_tokens=sealed.num_tokens)
    decode.add(prompt, n=5, emitted=emitted, source=source, **OPTIONS)
    decode.run()
    for choice in range(5):
        assert emitted[choice] + decode.tokens(choice=choice) == alone(prompt, choice)
        assert decode.deltas_of(choice=choice)[0].cached_tokens == length
    # Nothing of the prompt was computed here, for any of them.
    assert decode.backend.steps[0].context_len.tolist() == [length] * 5
    assert decode.num_used == 0


def test_resumed_choices_share_the_prompt_whatever_they_emitted() -> None:
    prompt = prompt_of(18)
    whole = [alone(prompt, choice) for choice in range(4)]
    core = CoreHarness(enable_prefix_caching=False)
    # The last one is at its end already.
    emitted = [whole[0][:3], [], whole[2][:7], whole[3]]
    core.add(prompt, n=4, emitted=emitted, **OPTIONS)
    core.run()
    assert [emitted[choice] + core.tokens(choice=choice) for choice in range(4)] == whole
    assert core.deltas_of(choice=3)[0].finish_reason == "length"
    assert [len(step.token_ids) for step in core.backend.steps[:2]] == [18 + 3, 1 + 1 + 8]


def test_a_choice_that_has_not_started_is_a_number() -> None:
    core = CoreHarness(max_num_seqs=4)
    prompt = prompt_of(40)
    core.add(prompt, n=50, max_tokens=3, **OPTIONS)
    scheduler = core.scheduler
    scheduler.add(core._inbox.messages.pop())  # type: ignore[arg-type]
    [request] = scheduler.state.requests.values()
    assert (len(request.sequences), len(request.held)) == (1, 49)
    assert scheduler.state.stats().num_waiting == 50
    seen = []
    update = core.scheduler.update

    def watched(*step: object) -> None:
        seen.append(len(request.sequences))
        update(*step)  # type: ignore[arg-type]

    core.scheduler.update = watched  # type: ignore[method-assign, assignment]
    core.run()
    assert max(seen) == 5
    assert [core.tokens(choice=choice) for choice in (0, 1, 25, 49)] == [
        alone(prompt, choice, max_tokens=3) for choice in (0, 1, 25, 49)
    ]


def test_choices_count_towards_the_queue() -> None:
    core = CoreHarness(max_num_queued_reqs=10, max_num_seqs=2)
    core.add(prompt_of(5), "first", n=8)
    core.add(prompt_of(6), "second", n=3)
    core.add(prompt_of(7), "third", n=2)
    core.add(prompt_of(8), "never", n=11)
    core.run()
    [second] = core.deltas_of("second", 2)
    assert second.error_code == "Overloaded"
    assert "8 requests and choices are waiting already, at most 10 may (max-num-queued-reqs)" in second.error_message
    [never] = core.deltas_of("never", 10)
    assert (never.error_code, never.error_param) == ("InvalidRequest", "n")
    assert "max-num-queued-reqs" in never.error_message
    assert core.finish_reason("first", 7) == core.finish_reason("third", 1) == "length"


@pytest.mark.parametrize("aborted", [[0], [1], [3], [0, 1], [2, 0], [0, 1, 2, 3]])
@pytest.mark.parametrize("num_steps", [0, 1, 2, 4])
def test_any_choice_may_be_aborted_at_any_time(aborted: list[int], num_steps: int) -> None:
    core = CoreHarness(max_num_batched_tokens=8, max_num_seqs=2, enable_prefix_caching=False)
    prompt = prompt_of(14)
    core.scheduler.add(make_add(prompt, n=4, **OPTIONS))
    for _ in range(num_steps):
        core.step()
    core.run(*(Abort(request_id="r", choice=choice) for choice in aborted))
    for choice in range(4):
        if choice in aborted:
            assert core.finish_reason(choice=choice) == "abort"
        else:
            assert core.tokens(choice=choice) == alone(prompt, choice)
    assert core.num_used == 0


def test_an_aborted_lead_leaves_what_it_computed_to_the_next() -> None:
    core = CoreHarness(max_num_batched_tokens=8, enable_prefix_caching=False)
    core.scheduler.add(make_add(prompt_of(14), n=2))
    core.step()
    core.run(Abort(request_id="r", choice=0))
    assert core.tokens(choice=1) == expected_tokens(prompt_of(14), 8)
    assert core.deltas_of(choice=1)[0].cached_tokens == 8


def test_kv_that_led_to_nan_is_not_handed_on() -> None:
    core = CoreHarness(enable_prefix_caching=False, max_num_batched_tokens=4)
    prompt = [*prompt_of(8)[:7], 7]
    core.backend.nan_tokens = {7}
    core.add(prompt, n=2, max_tokens=1)
    core.run()
    assert [core.deltas_of(choice=choice)[-1].error_code for choice in (0, 1)] == ["EngineFault"] * 2
    # The second computed all of it itself.
    assert [step.context_len.tolist() for step in core.backend.steps] == [[0], [4], [0], [4]]


def test_the_check_notices_a_block_that_two_would_write() -> None:
    core = CoreHarness()
    for request_id in ("a", "b"):
        core.scheduler.add(make_add(prompt_of(6), request_id))
    core.step()
    a, b = (core.scheduler.state.requests[request_id].lead for request_id in ("a", "b"))
    core.scheduler.state.check_integrity()
    core.scheduler.state.kv._pool.acquire(a.blocks[0][1:])
    core.scheduler.state.kv._pool.release(b.blocks[0][1:])
    b.blocks[0][1] = a.blocks[0][1]
    with pytest.raises(AssertionError, match="would write to shared blocks"):
        core.scheduler.state.check_integrity()
