"""Names of blocks: equal to vLLM's byte for byte, chained, apart for tenants and adapters."""

from __future__ import annotations

import logging
import pickle
from typing import Any

import cbor2
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pdmesh.engine.block_hash import BlockHasher, ExtraKeys, HashAlgorithm
from pdmesh.engine.hashed_bytes import FEW_TOKENS, MAX_TOKEN_ID, Cbor, Pickled

ALGORITHMS: tuple[HashAlgorithm, ...] = ("sha256", "sha256_cbor", "xxhash", "xxhash_cbor")
PROMPT = [(i * i * 7919 + i) % 152064 if i % 3 else i % 300 for i in range(50)]
SALT = {"cache_salt": "tenant-a"}
LORA = {"lora_name": "sql-lora", "lora_path": "/adapters/sql"}
KEYS: dict[str, dict[str, str]] = {"plain": {}, "salt": SALT, "lora": LORA, "both": SALT | LORA}

# What vLLM 0.32's init_none_hash and get_request_block_hasher(16, …) give for PROMPT: the parent of first blocks, the first
# block without extra keys, and the third and last block for each of KEYS. The seed is PYTHONHASHSEED; "" is without it.
GOLDEN: dict[tuple[HashAlgorithm, str], dict[str, str]] = {
    ("sha256", ""): {
        "none": "066b1e8987e027138e98701c46128929378935f9b6cd1549105ae6b4f0d71198",
        "first": "aa0eb5a4df8229a56ddaf2af65c12048db79c32d523ec2f4145f23263de4d883",
        "plain": "88b8b8f4b48b8bc296cf68f3336a982270aac9fcdca54baf8e407e5b2c36251a",
        "salt": "7856b5a22c957ddd198b049eddc0cc74ba95a406ba3b5162f32a5abfae6d02c1",
        "lora": "a8edf3a6872a5d5b26033ba985b4fbcb7df8877764b915d240bd0bca7e59f64e",
        "both": "12b9f7dc816762cbb9949bbdda7b031ffd0a4a48a5a1e42e8d18801e4c10eb88",
    },
    ("sha256_cbor", ""): {
        "none": "9bd96a485ad84efdafb72ee48a1d7a69bcead0f8f0433173941b276b9581eef0",
        "first": "b4ed7d1d6b8b710a3c1ae21b85e9ae1f16d4dc2cf01640759b2504ff142e6417",
        "plain": "a11dbfb3be633dfb4901427b5e8c96d85a69c8dc0f3f3592424c84765e2c1e85",
        "salt": "e4d1784ce85bba2b62af120f1685cd047e7e80a637082b6092f5a1cad67021b9",
        "lora": "47abd75cd54bd3725b4d0dfc8a63e4aecbf85760d6f1f26914c740bb8f6f4c20",
        "both": "72d9a19185dab5ad35b64d010376051d37ceb1825ca27aa78e4a57e83b5ae8e1",
    },
    ("sha256", "42"): {
        "none": "c0bc02c9fc92a4944335649961b9e55cc41b194bece4801e8c6ef0f0f3f5884a",
        "first": "2b0ebfb5c1d0bd29cb33e753c46dfcb4a80caedbf5b73249f58d5544f0f05528",
        "plain": "e0b675ead937ab4fd2b2ab61386317179cfbf3873a417488c69f24009209d273",
        "salt": "e1e858a95442ec8dbb45474a8287ed46722729bd8fc9d70a2dd9437a6bbe47c6",
        "lora": "123881dc534b940bf7a9b032afebb6b3f5db441325e9531c2ddd2b18fa8c1b98",
        "both": "ec9f30fe8c27b93eecd97b58e861c3c982ab67fc4f577d44ea082613c429f467",
    },
    ("sha256_cbor", "42"): {
        "none": "9fa6eb003f14425eb9c8e6baacfbcaab26257357b829c7bfa74ffcc4f31c1780",
        "first": "a676699e3d6635ba65301d7dc8e6d91997267d8ea10133678d2656bc5daa7541",
        "plain": "149f22fd6722c20992bcace51c0a869ab2fcaaab5fde9b1171dac75a22824a5e",
        "salt": "cc70cb15958f771398f8ca49f935c7059315e5c07475238f618342ee042ebf39",
        "lora": "a2afbde2d1a78905f579def9640ae672a7fc2de2314fee645b7e4318ec1bfa29",
        "both": "888e59ae6f58a5def05f287190d540f1c63fd0e9c20c77e139d5b4856c58e0a4",
    },
    ("xxhash", "42"): {
        "none": "b6cdd80ea04b31ad0b9fc22fff500882",
        "first": "8003bcf13aed64bb286e87ed5d70182d",
        "plain": "f3b68695c71217c68e84280fe9d7c543",
        "salt": "79343e9905f178d64b3ae404ebf57ae9",
        "lora": "9dfd5c4144dcdee37185398dde56372b",
        "both": "948bf61bdcccaed8325a1522202b7740",
    },
    ("xxhash_cbor", "42"): {
        "none": "a9d2e63407fce1a26c9dc9d7fa2d7caf",
        "first": "d06b9b77c134a36b45e12279faeb0d24",
        "plain": "3793a0beb779adf748ffc20e20d71c24",
        "salt": "493c8ad44f14479205dba3e114a77824",
        "lora": "61354055143cc92839920b5c5c2d3902",
        "both": "2e3d3044eb1e33d2dc3cfce9ec77c5bf",
    },
}


def names(hasher: BlockHasher, token_ids: list[int], **extras: str) -> list[bytes]:
    chain: list[bytes] = []
    hasher.extend(chain, np.array(token_ids, dtype=np.int64), ExtraKeys(**extras))
    return chain


@pytest.mark.parametrize(("algorithm", "seed"), GOLDEN)
def test_names_equal_vllms(algorithm: HashAlgorithm, seed: str) -> None:
    golden, hasher = GOLDEN[algorithm, seed], BlockHasher(algorithm, seed, 16)
    assert hasher.none_hash.hex() == golden["none"]
    assert names(hasher, PROMPT)[0].hex() == golden["first"]
    for case, extras in KEYS.items():
        chain = names(hasher, PROMPT, **extras)
        assert len(chain) == 3
        assert chain[-1].hex() == golden[case], case


token_ids = st.one_of(
    st.integers(0, 40), st.integers(200, 300), st.integers(65_000, 66_000), st.integers(0, MAX_TOKEN_ID)
)
# More than one character: of the shorter ones CPython has but one object each, which pickle then names by its first place.
texts = st.text(st.characters(exclude_categories=["Cs"]), min_size=2, max_size=300)
extra_keys = st.one_of(
    st.none(),
    st.builds(lambda *key: (("lora", *key),), texts, texts),
    st.builds(lambda salt: (("cache_salt", salt),), texts),
    st.builds(lambda *key: (("lora", *key[:2]), ("cache_salt", key[2])), texts, texts, texts),
)


def unshared(value: Any) -> Any:
    """A copy in which no string is the same object as another."""
    if isinstance(value, str):
        return "".join([value[:1], value[1:]])
    return tuple(map(unshared, value)) if isinstance(value, tuple) else value


@settings(max_examples=150, deadline=None)
@given(st.data(), st.sampled_from([1, 2, 3, 4, 16, 33]), extra_keys, st.binary(min_size=16, max_size=32))
def test_encodings_are_those_of_the_libraries(data: st.DataObject, size: int, keys: Any, parent: bytes) -> None:
    """Both ways to encode tokens, the quick one for few and the one for many."""
    ids = data.draw(st.lists(token_ids, min_size=size, max_size=2 * size))
    ids = ids * data.draw(st.sampled_from([1, 1 + 2 * FEW_TOKENS // len(ids)]))
    for encoding, reference in (
        (Pickled(size), lambda value: pickle.dumps(value, protocol=5)),
        (Cbor(size), lambda value: cbor2.dumps(value, canonical=True)),
    ):
        blocks = encoding.blocks(np.array(ids, dtype=np.int64))
        assert len(blocks) == len(ids) // size
        for number, tokens in enumerate(blocks):
            value = (parent, tuple(ids[number * size : (number + 1) * size]), unshared(keys))
            assert encoding.block(parent, tokens, encoding.encode_keys(keys)) == reference(value)


@given(texts)
def test_seeds_are_encoded_as_by_the_libraries(seed: str) -> None:
    assert Pickled(16).text(seed) == pickle.dumps(seed, protocol=5)
    assert Cbor(16).text(seed) == cbor2.dumps(seed, canonical=True)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_a_chain_is_the_same_in_one_go_and_block_by_block(algorithm: HashAlgorithm) -> None:
    hasher, ids = BlockHasher(algorithm, "s", 16), np.arange(1000, 1000 + 16 * 20 + 5)
    extras = ExtraKeys(**SALT, **LORA)
    whole: list[bytes] = []
    hasher.extend(whole, ids, extras)
    assert len(whole) == 20
    steps: list[bytes] = []
    for end in range(1, len(ids) + 1):
        hasher.extend(steps, ids[len(steps) * 16 : end], extras)
    assert steps == whole


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_names_differ_by_everything_that_the_kv_depends_on(algorithm: HashAlgorithm) -> None:
    hasher, other = BlockHasher(algorithm, "s", 16), [PROMPT[0] + 1, *PROMPT[1:]]
    cases = [names(hasher, PROMPT, **extras) for extras in KEYS.values()]
    cases.append(names(hasher, PROMPT, **LORA | {"lora_path": "/adapters/other"}))
    # The same text under another tag.
    cases.append(names(hasher, PROMPT, lora_name="tenant-a"))
    cases.append(names(hasher, other))
    cases.append(names(BlockHasher(algorithm, "t", 16), PROMPT))
    for block in range(3):
        assert len({chain[block] for chain in cases}) == len(cases)


def test_a_tail_changes_nothing() -> None:
    hasher = BlockHasher("sha256", "", 16)
    assert names(hasher, PROMPT) == names(hasher, PROMPT[:48])
    assert names(hasher, PROMPT[:15]) == []
    assert names(hasher, []) == []


@pytest.mark.parametrize("wrong", [-1, MAX_TOKEN_ID + 1])
@pytest.mark.parametrize("length", [16, 160])
@pytest.mark.parametrize("algorithm", ["xxhash", "xxhash_cbor"])
def test_impossible_token_ids_are_refused(algorithm: HashAlgorithm, length: int, wrong: int) -> None:
    ids = [*range(length - 1), wrong]
    with pytest.raises(ValueError, match=f"token id {wrong} is outside 0…{MAX_TOKEN_ID}"):
        names(BlockHasher(algorithm, "s", 16), ids)


def test_extra_keys_too_long_for_one_frame_are_refused() -> None:
    with pytest.raises(ValueError, match="extra keys"):
        names(BlockHasher("sha256", "", 16), PROMPT, cache_salt="x" * 70_000)


@pytest.mark.parametrize("algorithm", ["xxhash", "xxhash_cbor"])
def test_xxhash_without_a_seed_gets_a_secret_one_and_says_so(
    algorithm: HashAlgorithm, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        first, second = BlockHasher(algorithm, "", 16), BlockHasher(algorithm, "", 16)
    assert first.none_hash != second.none_hash
    assert "random" in caplog.text
    assert "prefix_caching_hash_seed" in caplog.text
    caplog.clear()
    assert BlockHasher(algorithm, "7", 16).none_hash == BlockHasher(algorithm, "7", 16).none_hash
    assert BlockHasher("sha256", "", 16).none_hash == BlockHasher("sha256", "", 16).none_hash
    assert not caplog.text


def test_events_show_extra_keys_without_tags() -> None:
    both = ExtraKeys(**SALT, **LORA)
    assert both.untagged(is_first=True) == ("sql-lora", "tenant-a")
    assert both.untagged(is_first=False) == ("sql-lora",)
    assert ExtraKeys(**SALT).untagged(is_first=False) is None
    assert ExtraKeys().untagged(is_first=True) is None
