"""What an engine's core makes of a push to it that does not end as it should."""

from __future__ import annotations

import numpy as np

from pdmesh.engine.block_hash import ExtraKeys
from pdmesh.engine.push_messages import EndPush, ExpectPush, PushArrived
from support.core_harness import CoreHarness

PROMPT, OTHER = list(range(20, 30)), list(range(40, 50))
NUM_FULL = 2


def test_what_was_given_away_keeps_its_name_when_the_push_it_was_of_proves_to_be_broken() -> None:
    """The names were taken off the blocks, whatever prompt they held by then: it was not found any more."""
    core = CoreHarness()
    prompts, landings = core.scheduler.state.kv.prompts, core.scheduler.remote.landings
    tokens, others = np.array(PROMPT, dtype=np.int64), np.array(OTHER, dtype=np.int64)
    names, other_names = (prompts.keys(each, ExtraKeys(cache_salt="")) for each in (tokens, others))
    landings.expect(ExpectPush(transfer_id="t", token_ids=PROMPT, cache_salt=""))
    [[first, second]] = core.scheduler.state.outbox.expected[0].blocks
    landings.arrived(PushArrived(transfer_id="t", num_blocks=NUM_FULL))
    assert prompts.find_run(names) == [[first, second]]
    assert landings.give_way()
    # Its second block is somebody else's by now; the other still has its name.
    [taken] = prompts.take(core.scheduler.state.kv.num_free - 1)
    assert second in taken
    assert first not in taken
    prompts.register([[second]], 0, other_names, others, ExtraKeys(cache_salt=""))
    landings.end(EndPush(transfer_id="t", is_unwanted=True, is_broken=True))
    assert prompts.find_run(other_names[:1]) == [[second]]
    assert prompts.find_run(names) == [[]], "what was broken is found"


def test_what_is_cached_of_expected_prompts_counts_for_their_share_of_the_pool_once() -> None:
    """Expectations held any number of cached blocks besides, which nobody else got while they lasted."""
    core = CoreHarness(num_blocks=64)
    prompts, landings = core.scheduler.state.kv.prompts, core.scheduler.remote.landings
    beginning = list(range(60, 60 + 28 * 4))

    def refusal(transfer_id: str, token_ids: list[int]) -> str:
        landings.expect(ExpectPush(transfer_id=transfer_id, token_ids=token_ids, cache_salt=""))
        return core.scheduler.state.outbox.expected[-1].reason

    tokens = np.array(beginning, dtype=np.int64)
    names = prompts.keys(tokens, ExtraKeys(cache_salt=""))
    blocks = prompts.take(28)
    prompts.register(blocks, 0, names, tokens, ExtraKeys(cache_salt=""))
    core.scheduler.state.kv.drop(blocks)
    # 28 of 32 are cached, and one after the other comes in behind them.
    for number in range(4):
        assert refusal(f"t{number}", beginning + [number] * 4) == ""
    assert refusal("t4", beginning + [9] * 4) == "no_room"
    # What a peer may still write counts alone, when it is not wanted; the rest is anybody's.
    for number in range(4):
        landings.end(EndPush(transfer_id=f"t{number}", is_unwanted=True))
    assert refusal("other", list(range(300, 300 + 28 * 4))) == ""
    assert refusal("another", list(range(30, 30 + 2 * 4))) == "no_room"
