"""Pulls between two cores over the real shm connector: same tokens, and every failure ends in its policy."""

import math
import random
from collections.abc import Callable

import msgspec
import pytest

from pdmesh.connector.shm import ShmConnector
from pdmesh.engine.messages import (
    Abort,
    ConnectorChanged,
    ConnectPeer,
    DisconnectPeer,
    OfferSealed,
)
from pdmesh.errors import TransferFailed
from pdmesh.protocol.messages import GroupBlocks, KVSource
from pdmesh.security import MeshSecret
from support.core_harness import CoreHarness, make_add
from support.fake_backend import VOCAB_SIZE, expected_tokens

SECRET = MeshSecret("x" * 32)


def prompt_of(length: int) -> list[int]:
    generator = random.Random(length)
    return [generator.randrange(2, VOCAB_SIZE) for _ in range(length)]


def make_core(peer_id: str, **options: int) -> CoreHarness:
    return CoreHarness(connectors={"shm": ShmConnector(peer_id, SECRET)}, **options)


@pytest.fixture
def pair() -> tuple[CoreHarness, CoreHarness]:
    prefill, decode = make_core("p@1"), make_core("d@1")
    decode.reach(prefill, "p@1")
    return prefill, decode


def source_of(sealed: OfferSealed, **changes: object) -> KVSource:
    source = KVSource(transfer_id="t", peer_id="p@1", groups=sealed.groups, num_tokens=sealed.num_tokens)
    return msgspec.structs.replace(source, **changes)


@pytest.mark.parametrize("length", [1, 3, 4, 5, 16, 17, 63, 150])
def test_a_pulled_prompt_goes_on_at_token_two(pair: tuple[CoreHarness, CoreHarness], length: int) -> None:
    prefill, decode = pair
    prompt = prompt_of(length)
    sealed = prefill.offer(prompt)
    decode.add(prompt, emitted=[prefill.tokens()], source=source_of(sealed))
    decode.run()
    assert prefill.tokens() + decode.tokens() == expected_tokens(prompt, 8)
    first = decode.deltas_of()[0]
    assert (first.cached_tokens, first.kv_source) == (length, "shm")
    assert first.kv_bytes == -(-length // 4) * decode.pool.shape.block_bytes
    [transfer] = decode.transfers
    assert (transfer.committed, transfer.transfer_id, transfer.peer_id) == (True, "t", "p@1")
    # Nothing of the prompt was computed here.
    assert decode.backend.steps[0].context_len.tolist() == [length]


@pytest.mark.parametrize("fail_policy", ["recompute", "fail"])
@pytest.mark.parametrize(
    "changes",
    [
        {"groups": []},
        {"groups": [GroupBlocks(group=0, block_ids=[1 << 40] * 5, generations=[1] * 5)]},
        {"groups": [GroupBlocks(group=0, block_ids=[(1 << 32) - 1] * 5, generations=[1] * 5)]},
        {"groups": [GroupBlocks(group=0, block_ids=[-1] * 5, generations=[1] * 5)]},
        {"groups": [GroupBlocks(group=0, block_ids=[1] * 5, generations=[-1] * 5)]},
        {"groups": [GroupBlocks(group=0, block_ids=[1] * 5, generations=[1 << 64] * 5)]},
        {"groups": [GroupBlocks(group=0, block_ids=[1] * 5, generations=[1] * 4)]},
        {"groups": [GroupBlocks(group=0, block_ids=[1] * 4, generations=[1] * 4)]},
        {"num_tokens": 0},
        {"num_tokens": -20, "groups": [GroupBlocks(group=0, block_ids=[], generations=[], first_block=-5)]},
        {"groups": [GroupBlocks(group=0, block_ids=[1] * 6, generations=[1] * 6, first_block=-1)]},
        {"groups": [GroupBlocks(group=1, block_ids=[1] * 5, generations=[1] * 5)]},
        {"groups": [GroupBlocks(group=group, block_ids=[1] * 5, generations=[1] * 5) for group in (0, 1)]},
        {"deadline_s": math.nan},
        {"deadline_s": math.inf},
    ],
)
def test_a_source_that_cannot_be_meets_the_failure_policy(
    pair: tuple[CoreHarness, CoreHarness], changes: dict[str, object], fail_policy: str
) -> None:
    prefill, decode = pair
    prompt = prompt_of(17)
    sealed = prefill.offer(prompt)
    source = source_of(sealed, fail_policy=fail_policy, **changes)
    decode.add(prompt, emitted=[prefill.tokens()], source=source)
    decode.run()
    [transfer] = decode.transfers
    assert not transfer.committed
    if fail_policy == "fail":
        assert decode.deltas_of()[-1].error_code == "TransferFailed"
    else:
        assert decode.deltas_of()[0].kv_source == f"recompute:{transfer.reason}"
        assert prefill.tokens() + decode.tokens() == expected_tokens(prompt, 8)
    assert decode.num_used == 0


def test_pulled_blocks_serve_later_prompts(pair: tuple[CoreHarness, CoreHarness]) -> None:
    prefill, decode = pair
    prompt = prompt_of(17)
    sealed = prefill.offer(prompt)
    decode.add(prompt, emitted=[prefill.tokens()], source=source_of(sealed))
    decode.run()
    decode.add([*prompt, 9, 9], "next")
    decode.run()
    assert decode.tokens("next") == expected_tokens([*prompt, 9, 9], 8)
    assert decode.deltas_of("next")[0].cached_tokens == 16


@pytest.mark.parametrize(("length", "num_pulled"), [(17, 1), (16, 0), (22, 2)])
def test_only_what_is_not_here_is_pulled(pair: tuple[CoreHarness, CoreHarness], length: int, num_pulled: int) -> None:
    prefill, decode = pair
    prompt = prompt_of(length)
    decode.add(prompt[:17], "warm", max_tokens=1)
    decode.run()
    sealed = prefill.offer(prompt)
    decode.add(prompt, emitted=[prefill.tokens()], source=source_of(sealed))
    decode.run()
    assert prefill.tokens() + decode.tokens() == expected_tokens(prompt, 8)
    [transfer] = decode.transfers
    assert (transfer.committed, transfer.num_bytes) == (True, num_pulled * decode.pool.shape.block_bytes)


@pytest.mark.parametrize("length", [1, 4, 16, 18])
def test_the_stock_flow_recomputes_the_last_token(pair: tuple[CoreHarness, CoreHarness], length: int) -> None:
    prefill, decode = pair
    prompt = prompt_of(length)
    sealed = prefill.offer(prompt, max_tokens=1)
    decode.add(prompt, source=source_of(sealed), recompute_last=True)
    decode.run()
    assert decode.tokens() == expected_tokens(prompt, 8)
    assert decode.backend.steps[0].context_len.tolist() == [length - 1]
    assert decode.deltas_of()[0].kv_source == "shm"


def test_a_tier_hit_brings_full_blocks_and_the_rest_is_computed(pair: tuple[CoreHarness, CoreHarness]) -> None:
    prefill, decode = pair
    prompt = prompt_of(20)
    sealed = prefill.offer(prompt)
    # All of the prompt's blocks are full: its last token still has to be computed.
    decode.add(prompt, source=source_of(sealed), offer_id="next", store_to_tier=True)
    decode.run()
    assert decode.tokens() == expected_tokens(prompt, 8)
    assert decode.deltas_of()[0].kv_source == "tier"
    assert decode.deltas_of()[0].cached_tokens == 19
    assert [each.num_tokens for each in decode.sealed] == [20]
    # The last block was recomputed in part only; there is nothing new for the tier but it.
    assert sum(len(each.keys) for each in decode.computed) <= 1


def break_generation(prefill: CoreHarness, sealed: OfferSealed) -> None:
    prefill.pool.bump(sealed.groups[0].block_ids[-1:])


def lose_peer(prefill: CoreHarness, sealed: OfferSealed) -> None:
    CoreHarness.opened[-1].send(DisconnectPeer(peer_id="p@1"))


@pytest.mark.parametrize(("fault", "reason"), [(break_generation, "stale"), (lose_peer, "peer_lost")])
@pytest.mark.parametrize("policy", ["recompute", "fail"])
def test_a_failed_pull_ends_in_the_policy(
    pair: tuple[CoreHarness, CoreHarness],
    fault: Callable[[CoreHarness, OfferSealed], None],
    reason: str,
    policy: str,
) -> None:
    prefill, decode = pair
    prompt = prompt_of(17)
    sealed = prefill.offer(prompt)
    fault(prefill, sealed)
    decode.add(prompt, emitted=[prefill.tokens()], source=source_of(sealed, fail_policy=policy))
    decode.run()
    [transfer] = decode.transfers
    assert (transfer.committed, transfer.reason) == (False, reason)
    if policy == "recompute":
        assert prefill.tokens() + decode.tokens() == expected_tokens(prompt, 8)
        assert decode.deltas_of()[0].kv_source == f"recompute:{reason}"
        assert decode.deltas_of()[0].cached_tokens == 0
    else:
        [delta] = decode.deltas_of()
        assert (delta.error_code, delta.token_ids) == ("TransferFailed", [])
    assert decode.num_used == 0


@pytest.mark.parametrize(
    ("changes", "reason"),
    [({"num_tokens": 40}, "mismatch"), ({"num_tokens": 12}, "mismatch")],
)
def test_a_source_that_does_not_fit_is_not_pulled(
    pair: tuple[CoreHarness, CoreHarness], changes: dict[str, object], reason: str
) -> None:
    prefill, decode = pair
    prompt = prompt_of(17)
    sealed = prefill.offer(prompt)
    decode.add(prompt, emitted=[prefill.tokens()], source=source_of(sealed, **changes))
    decode.run()
    assert [each.reason for each in decode.transfers] == [reason]
    assert prefill.tokens() + decode.tokens() == expected_tokens(prompt, 8)


def test_blocks_of_an_aborted_pull_stay_until_it_has_ended(pair: tuple[CoreHarness, CoreHarness]) -> None:
    prefill, decode = pair
    prompt = prompt_of(17)
    sealed = prefill.offer(prompt)
    scheduler = decode.scheduler
    scheduler.add(make_add(prompt, emitted=[prefill.tokens()], source=source_of(sealed)))
    assert not scheduler.schedule().sequences
    assert decode.num_used == 5
    scheduler.abort("r")
    scheduler.state.check_integrity()
    assert decode.num_used == 5
    decode.run()
    assert decode.finish_reason() == "abort"
    [transfer] = decode.transfers
    assert not transfer.committed
    assert decode.num_used == 0


def test_every_source_ends_when_its_request_ends_first(pair: tuple[CoreHarness, CoreHarness]) -> None:
    prefill, decode = pair
    prompt = prompt_of(17)
    sealed = prefill.offer(prompt)
    decode.add(prompt, "waits", emitted=[[5]], source=source_of(sealed, transfer_id="a"))
    decode.send(Abort(request_id="waits"))
    decode.add([], "bad", source=source_of(sealed, transfer_id="b"))
    decode.run()
    assert {each.transfer_id: each.reason for each in decode.transfers} == {"a": "aborted", "b": "refused"}


def test_others_decode_while_a_pull_runs(pair: tuple[CoreHarness, CoreHarness]) -> None:
    prefill, decode = pair
    prompt = prompt_of(40)
    sealed = prefill.offer(prompt)
    decode.add(prompt_of(3), "other", max_tokens=3)
    decode.add(prompt, emitted=[prefill.tokens()], source=source_of(sealed))
    decode.run()
    assert decode.tokens("other") == expected_tokens(prompt_of(3), 3)
    assert prefill.tokens() + decode.tokens() == expected_tokens(prompt, 8)


def test_resuming_several_choices_from_one_ticket(pair: tuple[CoreHarness, CoreHarness]) -> None:
    prefill, decode = pair
    prompt, options = prompt_of(18), {"temperature": 1.1, "seed": 9, "n": 3}
    sealed = prefill.offer(prompt, **options)
    emitted = [prefill.tokens(choice=choice) for choice in (0, 2)]
    decode.add(prompt, choices=[0, 2], emitted=emitted, source=source_of(sealed), **options)
    decode.run()
    whole = CoreHarness()
    whole.add(prompt, **options)
    whole.run()
    for choice in (0, 2):
        assert prefill.tokens(choice=choice) + decode.tokens(choice=choice) == whole.tokens(choice=choice)


def corrupt_source(sealed: OfferSealed) -> KVSource:
    """Blocks that do not hold what their owner has summed."""
    groups = [msgspec.structs.replace(each, checksums=[5] * len(each.block_ids)) for each in sealed.groups]
    return source_of(sealed, groups=groups, offer_id="offer")


@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize("num_emitted", [1, 3])
def test_tokens_drawn_from_damaged_kv_are_drawn_again_and_shown_once(is_async: bool, num_emitted: int) -> None:
    """A pull that is corrupt says of the token before it that it may be wrong: it was gone on from all the same."""
    prefill, decode = make_core("p@1"), make_core("d@1", is_async=is_async)
    decode.reach(prefill, "p@1")
    prompt, options = prompt_of(18), {"temperature": 1.1, "seed": 9, "n": 3, "frequency_penalty": 0.5}
    sealed = prefill.offer(prompt, **options)
    whole = CoreHarness()
    whole.add(prompt, **options)
    whole.run()
    right = {choice: whole.tokens(choice=choice) for choice in (0, 1, 2)}
    assert all(prefill.tokens(choice=choice) == right[choice][:1] for choice in right)
    emitted = [right[choice][:num_emitted] for choice in right]
    emitted[1] = [*emitted[1][:-1], emitted[1][-1] ^ 1]
    decode.add(prompt, choices=[0, 1, 2], emitted=emitted, source=corrupt_source(sealed), **options)
    decode.run()
    assert [each.reason for each in decode.transfers] == ["corrupt"]
    for choice in (0, 2):
        assert right[choice][:num_emitted] + decode.tokens(choice=choice) == right[choice]
        assert decode.finish_reason(choice=choice) == "length"
        assert decode.deltas_of(choice=choice)[0].kv_source.startswith("recompute:corrupt" if choice == 0 else "")
    [delta] = decode.deltas_of(choice=1)
    assert (delta.error_code, delta.token_ids) == ("DamagedKV", [])
    assert decode.num_used == 0


def test_a_proxy_can_tell_from_the_error_that_kv_was_damaged(pair: tuple[CoreHarness, CoreHarness]) -> None:
    prefill, decode = pair
    prompt = prompt_of(18)
    source = corrupt_source(prefill.offer(prompt))
    decode.add(prompt, emitted=[prefill.tokens()], source=msgspec.structs.replace(source, fail_policy="fail"))
    decode.run()
    [delta] = decode.deltas_of()
    assert (delta.error_code, delta.token_ids) == ("TransferFailed", [])
    assert TransferFailed(delta.error_message).is_corrupt
    assert not TransferFailed("the KV of this request could not be fetched: stale").is_corrupt


def test_a_connector_that_is_given_up_leaves_the_others_of_its_peer(pair: tuple[CoreHarness, CoreHarness]) -> None:
    prefill, decode = pair
    sealed = prefill.offer(prompt_of(17))
    decode.send(DisconnectPeer(peer_id="p@1", connector="nixl"))
    decode.add(prompt_of(17), emitted=[prefill.tokens()], source=source_of(sealed))
    decode.run()
    assert [each.committed for each in decode.transfers] == [True]


def test_connecting_over_a_connector_that_is_not_there_is_answered() -> None:
    core = make_core("d@1")
    answer = core.connect(ConnectPeer(peer_id="p@1", connector="nixl", metadata=b"", num_blocks=1, block_bytes=1))
    assert "no connector nixl" in answer.error


def test_new_metadata_of_a_connector_reaches_the_server() -> None:
    class Changing(ShmConnector):
        """shm, but that its metadata changes once it is watched."""

        def watch_metadata(self, on_changed: Callable[[bytes], None]) -> None:
            on_changed(b"new")

    core = CoreHarness(connectors={"shm": Changing("d@1", SECRET)})
    assert ConnectorChanged(connector="shm", metadata=b"new") in core.run()
