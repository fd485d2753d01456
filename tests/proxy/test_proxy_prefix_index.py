"""Prefix affinity remembers who computed a beginning, per tenant, within its bound."""

from __future__ import annotations

from pdmesh_proxy.prefix_index import CHUNK_TOKENS, MAX_HOLDERS, PrefixIndex

PROMPT = list(range(5 * CHUNK_TOKENS + 7))


def test_longest_common_beginning_counts_for_each_holder() -> None:
    index = PrefixIndex(100)
    index.record(index.keys(PROMPT, ""), "a@1")
    shared = PROMPT[: 2 * CHUNK_TOKENS]
    index.record(index.keys(shared, ""), "b@1")
    assert index.cached_tokens(index.keys(PROMPT, "")) == {"a@1": 5 * CHUNK_TOKENS, "b@1": 2 * CHUNK_TOKENS}
    forked = [*shared, *([9] * CHUNK_TOKENS)]
    assert index.cached_tokens(index.keys(forked, "")) == {"a@1": 2 * CHUNK_TOKENS, "b@1": 2 * CHUNK_TOKENS}


def test_another_tenant_sees_nothing() -> None:
    index = PrefixIndex(100)
    index.record(index.keys(PROMPT, "tenant-1"), "a@1")
    assert index.cached_tokens(index.keys(PROMPT, "tenant-2")) == {}


def test_a_changed_first_token_shares_nothing() -> None:
    index = PrefixIndex(100)
    index.record(index.keys(PROMPT, ""), "a@1")
    assert index.cached_tokens(index.keys([77, *PROMPT[1:]], "")) == {}


def test_the_bounds_hold() -> None:
    index = PrefixIndex(8)
    for start in range(20):
        index.record(index.keys([start, *PROMPT], ""), f"e{start}@1")
    assert len(index) == 8
    for number in range(10):
        index.record(index.keys(PROMPT[:CHUNK_TOKENS], ""), f"h{number}@1")
    holders = index.cached_tokens(index.keys(PROMPT[:CHUNK_TOKENS], ""))
    assert set(holders) == {f"h{number}@1" for number in range(10 - MAX_HOLDERS, 10)}


def test_zero_entries_is_off() -> None:
    index = PrefixIndex(0)
    index.record(index.keys(PROMPT, ""), "a@1")
    assert (len(index), index.cached_tokens(index.keys(PROMPT, ""))) == (0, {})
