"""What an owner's core says of its pushes: none has ended well while its prompt may still prove to be broken."""

from __future__ import annotations

import pytest

from pdmesh.connector.base import PullResult
from pdmesh.engine.push_messages import INVALID, BeginPush, PushReport
from pdmesh.engine.pushing import RESET, Pushing
from pdmesh.errors import EngineFault
from support.core_harness import CoreHarness, make_add


def begun(core: CoreHarness) -> Pushing:
    """Both full blocks of a prompt of ten are computed, written and asked for; its last two tokens are not computed."""
    core.scheduler.add(make_add(list(range(20, 30)), "r", prefill_only=True, offer_id="offer"))
    core.step()
    return core.scheduler.remote.pushing


def begin(pushing: Pushing) -> None:
    pushing.begin(BeginPush(transfer_id="t", offer_id="offer", peer_id="peer", first_block=0, targets=[[7, 8]]))


def reports(core: CoreHarness) -> list[PushReport]:
    return core.scheduler.state.outbox.pushes


def write(core: CoreHarness) -> None:
    [order] = core.scheduler.state.outbox.writes
    assert core.scheduler.remote.pushing.end(
        PullResult(transfer_id=order.transfer_id, reason="", num_bytes=1, duration_s=0.0)
    )


@pytest.mark.parametrize("is_sound", [True, False])
def test_all_that_is_written_is_vouched_for_when_the_prompt_is_computed(is_sound: bool) -> None:
    core = CoreHarness(max_num_batched_tokens=8)
    pushing = begun(core)
    begin(pushing)
    write(core)
    [told] = reports(core)
    assert (told.num_blocks, told.ended) == (2, False)
    if is_sound:
        core.step()
    else:
        core.scheduler.fail_request("r", EngineFault("broken"))
    last = reports(core)[-1]
    assert (last.num_blocks, last.ended, last.reason) == (2, True, "" if is_sound else INVALID)
    assert not pushing.is_active


def test_what_was_computed_before_a_reset_is_not_written_after_it() -> None:
    core = CoreHarness(max_num_batched_tokens=8)
    pushing = begun(core)
    core.scheduler.reset_prefix_cache()
    begin(pushing)
    [told] = reports(core)
    assert (told.ended, told.reason) == (True, RESET)
    assert not core.scheduler.state.outbox.writes
