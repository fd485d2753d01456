"""Incremental text: joined deltas are the whole, characters are never halved, stop strings never leak."""

import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from pdmesh.models.source import DEMO_MODEL
from pdmesh.openai.text import StopScanner, StopStrings, TextModel, load_text_model
from pdmesh.openai.text.vocabulary import Spelling

DEMO = load_text_model(DEMO_MODEL)
ids_lists = st.lists(st.integers(0, DEMO.vocab_size + 5), max_size=40)
PIECES = ["un", "##believ", "##able", "story", "."]


def word_pieces() -> TextModel:
    """A tokenizer whose decoder is neither byte-level nor SentencePiece's."""
    vocab = {piece: index for index, piece in enumerate(["[UNK]", *PIECES])}
    tokenizer = Tokenizer(models.WordPiece(vocab, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    return TextModel(name="pieces", tokenizer=tokenizer, eos_token_ids=[])


def metaspace() -> TextModel:
    vocab = {piece: index for index, piece in enumerate(["<unk>", "▁the", "▁", "s", "▁s", "ea", "▁é"])}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    tokenizer.decoder = decoders.Metaspace()
    return TextModel(name="metaspace", tokenizer=tokenizer, eos_token_ids=[])


@given(ids_lists, st.booleans())
@settings(max_examples=150, deadline=None)
def test_joined_deltas_are_the_decoded_whole(ids: list[int], skip: bool) -> None:
    detokenizer = DEMO.detokenizer(skip_special_tokens=skip)
    joined = "".join([*[detokenizer.push(token_id) for token_id in ids], detokenizer.finish()])
    assert joined == DEMO.decode(ids, skip)
    known = [token_id for token_id in ids if token_id < DEMO.vocab_size]
    assert joined == DEMO._tokenizer.decode(known, skip_special_tokens=skip)


# SmolLM2 has no tokens for some bytes: those of a few control characters and of planes 4 and up.
SPOKEN = st.characters(min_codepoint=0x20, max_codepoint=0x3FFFF, exclude_categories=["Cs"])


@given(st.text(SPOKEN, max_size=60))
@settings(max_examples=150, deadline=None)
def test_no_replacement_character_comes_out_of_whole_text(said: str) -> None:
    detokenizer = DEMO.detokenizer(skip_special_tokens=False)
    deltas = [detokenizer.push(token_id) for token_id in DEMO.encode(said)]
    assert "".join(deltas) == said
    assert detokenizer.finish() == ""
    if "\ufffd" not in said:
        assert not any("\ufffd" in delta for delta in deltas)


@given(ids_lists, ids_lists)
@settings(max_examples=100, deadline=None)
def test_output_continues_its_prompt(prompt: list[int], output: list[int]) -> None:
    """Also when the prompt ends inside a character."""
    whole = DEMO.detokenizer(skip_special_tokens=True)
    for token_id in prompt:
        whole.push(token_id)
    after = DEMO.detokenizer(context=prompt, skip_special_tokens=True)
    assert [after.push(token_id) for token_id in output] == [whole.push(token_id) for token_id in output]


@given(ids_lists)
@settings(max_examples=50, deadline=None)
def test_peeking_changes_nothing(ids: list[int]) -> None:
    plain, peeked = DEMO.detokenizer(), DEMO.detokenizer()
    for token_id in ids:
        peeked.peek(token_id + 1)
        assert peeked.peek(token_id) == plain.push(token_id) == peeked.push(token_id)


def test_a_character_appears_whole_with_its_last_token() -> None:
    detokenizer = DEMO.detokenizer()
    ids = DEMO.encode("🦙")
    assert len(ids) > 1
    assert [detokenizer.push(token_id) for token_id in ids] == [*[""] * (len(ids) - 1), "🦙"]


@pytest.mark.parametrize(
    ("model", "spelling"), [(word_pieces(), Spelling.OTHER), (metaspace(), Spelling.SENTENCEPIECE)]
)
def test_other_decoders_agree_with_their_own(model: TextModel, spelling: Spelling) -> None:
    assert model.vocabulary.spelling is spelling
    for ids in ([1, 2, 3], [4, 1, 2, 3, 4], [3, 5, 1, 1], [1] * 50, []):
        known = [token_id for token_id in ids if token_id < model.vocab_size]
        assert model.decode(known) == model._tokenizer.decode(known)


def test_the_ten_thousandth_token_costs_what_the_first_did() -> None:
    for model, token_id in ((DEMO, 504), (word_pieces(), 4)):
        detokenizer = model.detokenizer()

        def seconds_for(count: int, detokenizer=detokenizer, token_id=token_id) -> float:  # type: ignore[no-untyped-def]
            started = time.process_time()
            for _ in range(count):
                detokenizer.push(token_id)
            return time.process_time() - started

        seconds_for(200)
        early = min(seconds_for(500) for _ in range(3))
        seconds_for(5000)
        late = min(seconds_for(500) for _ in range(3))
        assert late < 5 * early + 0.005


def reference_cut(said: str, stops: list[str], include: bool) -> tuple[str, str | None]:
    """The definition: the stop complete at the earliest character, the longest of those."""
    for end in range(1, len(said) + 1):
        found = [stop for stop in stops if said[:end].endswith(stop)]
        if found:
            stop = max(found, key=len)
            return said[: end if include else end - len(stop)], stop
    return said, None


@given(
    st.lists(st.text("abc", max_size=4), max_size=12),
    st.lists(st.text("abc", min_size=1, max_size=5), max_size=4),
    st.booleans(),
)
@settings(max_examples=400, deadline=None)
def test_stop_strings_are_found_however_the_text_is_cut(pieces: list[str], stops: list[str], include: bool) -> None:
    scanner = StopScanner(StopStrings(stops), include)
    out, seen = "", ""
    expected, stop = reference_cut("".join(pieces), stops, include)
    for piece in pieces:
        scanned = scanner.push(piece)
        out += scanned.text
        seen += piece
        assert expected.startswith(out)
        if scanned.stop is not None:
            assert (out, scanned.stop) == (expected, stop)
            return
        # Held back is exactly the longest suffix that begins a stop string.
        lengths = [n for n in range(1, len(seen) + 1) if any(s.startswith(seen[-n:]) and len(s) > n for s in stops)]
        assert len(seen) - len(out) == max(lengths, default=0)
    assert stop is None
    assert out + scanner.flush() == expected


def test_a_stop_cannot_begin_before_min_tokens() -> None:
    scanner = StopScanner(StopStrings(["ab"]), include=False)
    assert scanner.push("a", armed=False).text == "a"
    assert scanner.push("b").stop is None
    assert scanner.push("ab").stop == "ab"


def test_a_long_stop_is_not_quadratic() -> None:
    scanner = StopScanner(StopStrings(["a" * 1023 + "b"] * 4), include=False)
    started = time.process_time()
    for _ in range(20_000):
        scanner.push("a")
    assert time.process_time() - started < 5
