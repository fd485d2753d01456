"""A core pulls a block of its own pool over a connector: what moves nothing, or the wrong bytes, is found out."""

from __future__ import annotations

import dataclasses
import select

import pytest

from pdmesh.connector.base import Pull
from pdmesh.connector.shm import ShmConnector
from pdmesh.engine.messages import OwnBlockPulled, PullOwnBlock
from pdmesh.security import MeshSecret
from support.core_harness import CoreHarness
from support.fake_backend import expected_tokens

SECRET = MeshSecret("x" * 32)
ORDER = PullOwnBlock(number=7, peer_id="e@1", deadline_s=5.0)


class Garbling(ShmConnector):
    """Says that all is well, and writes elsewhere."""

    def start(self, pull: Pull) -> None:
        block = next(each for each in range(64) if each not in (*pull.source_block_ids, *pull.target_block_ids))
        super().start(dataclasses.replace(pull, target_block_ids=[block]))


def own_core(connector: ShmConnector, **options: int) -> CoreHarness:
    core = CoreHarness(connectors={"shm": connector}, **options)
    core.reach(core, "e@1")
    return core


def prompt_of(length: int) -> list[int]:
    return [2 + (7 * index) % 50 for index in range(length)]


def answers(core: CoreHarness) -> list[OwnBlockPulled]:
    for _ in range(20):
        found = [message for message in core.sent if isinstance(message, OwnBlockPulled)]
        if found:
            return found
        select.select(core.links.descriptors, [], [], 0.5)
        core.run()
    raise AssertionError("the order was not answered")


@pytest.mark.parametrize("is_async", [False, True])
def test_a_connector_that_works_is_proved_beside_steps_that_run(is_async: bool) -> None:
    core = own_core(ShmConnector("e@1", SECRET), is_async=is_async)
    prompt = prompt_of(30)
    core.add(prompt, max_tokens=12)
    core.run(ORDER)
    assert answers(core) == [OwnBlockPulled(number=7)]
    assert core.tokens() == expected_tokens(prompt, 12)
    assert core.num_used == 0


def test_a_connector_that_moves_other_bytes_is_found_out() -> None:
    core = own_core(Garbling("e@1", SECRET))
    core.run(ORDER)
    assert answers(core) == [OwnBlockPulled(number=7, error="what arrived is not what was there")]
    assert core.num_used == 0


def test_a_peer_that_was_never_connected_is_an_error() -> None:
    core = CoreHarness(connectors={"shm": ShmConnector("e@1", SECRET)})
    core.run(ORDER)
    assert answers(core) == [OwnBlockPulled(number=7, error="peer_lost")]


def test_it_waits_until_there_are_two_free_blocks() -> None:
    core = own_core(ShmConnector("e@1", SECRET), num_blocks=8, max_model_len=32)
    core.add(prompt_of(29), prefill_only=True, offer_id="offer")
    core.run(ORDER)
    assert core.num_used == 8
    assert not [message for message in core.sent if isinstance(message, OwnBlockPulled)]
    core.scheduler.release_offer("offer")
    core.run()
    assert answers(core) == [OwnBlockPulled(number=7)]
    assert core.num_used == 0
