"""Block keys: equal for equal content, different for anything that the content depends on."""

import hashlib

import numpy as np

from pdmesh.engine.block_key import KEY_BYTES, block_keys, extend_chain, first_parent, root_key

ROOT = root_key("model", "layout", 0)


def test_a_chain_is_sha256_over_parent_and_tokens() -> None:
    first = hashlib.sha256(ROOT + np.array([1, 2], "<u4").tobytes()).digest()
    second = hashlib.sha256(first + np.array([3, 70000], "<u4").tobytes()).digest()
    assert block_keys([1, 2, 3, 70000, 5], 2, root=ROOT) == [first, second]


def test_only_full_blocks_have_keys() -> None:
    assert [len(block_keys(range(n), 16, root=ROOT)) for n in (0, 1, 15, 16, 17, 31, 32)] == [0, 0, 0, 1, 1, 1, 2]
    assert all(len(key) == KEY_BYTES for key in block_keys(range(64), 16, root=ROOT))


def test_everything_before_a_block_changes_its_key() -> None:
    keys = block_keys([1, 2, 3, 4], 2, root=ROOT)
    assert block_keys([9, 2, 3, 4], 2, root=ROOT)[1] != keys[1]
    assert block_keys([1, 2, 3, 4], 2, root=root_key("model", "layout", 1)) != keys
    assert block_keys([1, 2, 3, 4], 2, root=root_key("mode", "llayout", 0)) != keys


def test_extra_keys_are_told_apart_by_their_source() -> None:
    plain = block_keys([1, 2], 2, root=ROOT)
    salted = block_keys([1, 2], 2, root=ROOT, cache_salt="x")
    adapted = block_keys([1, 2], 2, root=ROOT, lora="x")
    both = block_keys([1, 2], 2, root=ROOT, cache_salt="x", lora="x")
    assert len({keys[0] for keys in (plain, salted, adapted, both)}) == 4


def test_a_chain_may_be_extended_in_pieces() -> None:
    tokens = np.arange(100)
    whole = block_keys(tokens, 8, root=ROOT, cache_salt="s")
    chain: list[bytes] = []
    for start in range(0, 96, 8):
        parent = chain[-1] if chain else first_parent(ROOT, cache_salt="s")
        extend_chain(chain, tokens[start : start + 8], 8, parent)
    assert chain == whole
