"""KV of an engine's own that changed in memory: who holds it ends, with what is true of its tokens, and nobody finds it again."""

from __future__ import annotations

import pytest

from pdmesh.engine.messages import ResetPrefixCache
from pdmesh.protocol.messages import GroupBlocks
from support.core_harness import CoreHarness, make_add
from support.fake_backend import expected_tokens
from support.prompts import random_prompt


def held(core: CoreHarness, name: str, *, is_past: bool = False) -> GroupBlocks:
    """The first block of a request, or of what was there before it."""
    [block_id] = core.scheduler.state.requests[name].lead.blocks[0][:1]
    [generation] = core.pool.generations_of([block_id])
    return GroupBlocks(group=0, block_ids=[block_id], generations=[generation - is_past])


@pytest.mark.parametrize(
    ("num_steps", "n", "code"),
    [(1, 1, "EngineFault"), (4, 1, "DamagedKV"), (4, 2, "DamagedKV")],
    ids=["in its prompt", "after a token", "after a choice's token"],
)
def test_who_holds_damaged_kv_ends_and_may_go_on_elsewhere_unless_a_token_is_out(
    num_steps: int, n: int, code: str
) -> None:
    core = CoreHarness(max_num_batched_tokens=8)
    prompt = random_prompt(20)
    core.scheduler.add(make_add(prompt, "r", max_tokens=8, n=n))
    for _ in range(num_steps):
        core.step()
    core.send(ResetPrefixCache(number=1, damaged=[held(core, "r")]))
    core.run()
    for choice in range(n):
        last = core.deltas_of("r", choice=choice)[-1]
        assert (last.finish_reason, last.error_code) == ("error", code)
    assert core.num_used == 0
    core.add(prompt, "again", max_tokens=8)
    core.run()
    assert core.deltas_of("again")[0].cached_tokens == 0
    assert core.tokens("again") == expected_tokens(prompt, 8)


@pytest.mark.parametrize("num_steps", [1, 4])
def test_who_has_lost_damaged_kv_since_ends_if_a_token_is_out(num_steps: int) -> None:
    """A preempted request held none of it any more, and went on behind tokens that were drawn from it."""
    core = CoreHarness(max_num_batched_tokens=8)
    prompt = random_prompt(20)
    core.scheduler.add(make_add(prompt, "r", max_tokens=8))
    for _ in range(num_steps):
        core.step()
    damaged = held(core, "r")
    core.scheduler.state.preempt(core.scheduler.state.requests["r"].lead)
    core.send(ResetPrefixCache(number=1, damaged=[damaged]))
    core.run()
    if num_steps == 1:
        assert core.tokens("r") == expected_tokens(prompt, 8)
    else:
        assert core.deltas_of("r")[-1].error_code == "DamagedKV"
    assert core.num_used == 0


def test_who_holds_what_has_come_in_its_place_goes_on() -> None:
    core = CoreHarness(max_num_batched_tokens=8)
    prompt = random_prompt(20)
    core.scheduler.add(make_add(prompt, "r", max_tokens=8))
    core.step()
    core.send(ResetPrefixCache(number=1, damaged=[held(core, "r", is_past=True)]))
    core.run()
    assert core.tokens("r") == expected_tokens(prompt, 8)
