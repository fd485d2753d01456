"""Tokenizers from GGUF files and Hugging Face directories, held against known ids, a plain reference, and transformers."""

import json
import random
import subprocess
import sys
import time
from itertools import pairwise
from pathlib import Path

import pytest
from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers, trainers

from pdmesh.errors import ConfigError, InvalidRequest
from pdmesh.models.source import DEMO_MODEL, resolve
from pdmesh.openai.text import TextModel, load_text_model
from support.tiny_models import make_tiny
from support.tokenizer_gguf import write_tokenizer_gguf

# From transformers' tokenizer of the same file.
KNOWN = {
    "Hello world": [19556, 905],
    "  a  b": [216, 253, 216, 278],
    "日本é🙂": [23274, 115, 40993, 2756, 10813, 38887],
    "12345 67": [33, 34, 35, 36, 37, 216, 38, 39],
    "def f(x):\n    return x**2": [1604, 275, 24, 104, 727, 472, 1003, 1792, 828, 34],
    "I'm WE'LL": [57, 5248, 26587, 23, 16421],
    "<|im_start|>user\nhi<|im_end|>": [1, 4093, 198, 6004, 2],
    "\r\n\t ": [15290, 216],
    "": [],
}
CORPUS = [
    "The quick brown fox's 12345 jumps over it'll 007 lazy dogs",
    "été déjà 日本語 Привет мир",
    "a_b(c); x = y**2\n\n  z",
] * 20
SAMPLES = [
    *(
        "The fox's 1234567 DOG'S it'LL",
        "  two  spaces \n\n\n newline\r\n tab\t",
        "Größe: 3,14159 €",
        "日本é🙂🦙 Ünï",
        "a\u0301 \u00a0x",
    ),
    *("def f(x):\n\treturn x**2  # ok", "CamelCaseWord HTTPServer", "ǅungla ʰmod", "", " ", "1", "12", "123", "1234"),
]
LLAMA3 = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
QWEN2 = LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")


def random_texts(count: int, seed: int) -> list[str]:
    alphabets = [(0, 0x250), (0x370, 0x500), (0x590, 0x700), (0x900, 0x980), (0x3040, 0x3100), (0x4E00, 0x4F00)]
    alphabet = [chr(code) for low, high in [*alphabets, (0x1F600, 0x1F650)] for code in range(low, high)]
    alphabet += ["  ", "\n", "<|im_end|>", "<|im_start|>", "12", "'ll", "🤷🏽‍♀️"]
    generator = random.Random(seed)
    return ["".join(generator.choices(alphabet, k=generator.randint(1, 40))) for _ in range(count)]


@pytest.mark.parametrize(("said", "ids"), KNOWN.items())
def test_the_demo_model_gives_known_ids(text: TextModel, said: str, ids: list[int]) -> None:
    assert text.encode(said) == ids
    assert text.decode(ids, skip_special_tokens=False) == said


def test_the_demo_model_loads_fast_and_knows_itself(text: TextModel) -> None:
    started = time.process_time()
    load_text_model(DEMO_MODEL)
    assert time.process_time() - started < 1
    assert (text.vocab_size, text.eos_token_ids, text.vocabulary.longest_token_chars) == (49152, [2], 81)


def test_text_needs_no_torch_transformers_or_gguf() -> None:
    code = (
        "import sys\n"
        "from pdmesh.openai.text import load_text_model\n"
        "import pdmesh.openai.app\n"
        f"load_text_model({DEMO_MODEL!r}).encode('x')\n"
        "sys.exit(', '.join(sorted({'torch', 'transformers', 'gguf', 'sentencepiece'} & set(sys.modules))) or 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.full
@pytest.mark.filterwarnings("ignore")
def test_the_demo_model_equals_transformers(text: TextModel) -> None:
    from transformers import AutoTokenizer

    path = resolve(DEMO_MODEL).path
    theirs = AutoTokenizer.from_pretrained(str(path.parent), gguf_file=path.name)
    # transformers reads tokenizer.ggml.pre for other families only; SmolLM2's own tokenizer takes digits one by one,
    # which shows where two spaces precede one.
    theirs.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    for said in [*KNOWN, *SAMPLES, *random_texts(3000, seed=0)]:
        ids = text.encode(said)
        assert ids == theirs(said)["input_ids"], said
        for skip in (True, False):
            assert text.decode(ids, skip) == theirs.decode(ids, skip_special_tokens=skip), said
    messages = [{"role": role, "content": f" {role} "} for role in ("system", "user", "assistant", "user")]
    for prompt in (True, False):
        expected = theirs.apply_chat_template(messages, tokenize=False, add_generation_prompt=prompt)
        assert text.render_chat(messages, add_generation_prompt=prompt) == expected
    generator = random.Random(1)
    for _ in range(300):
        ids = generator.choices(range(49152), k=20)
        assert text.decode(ids, False) == theirs.decode(ids)


@pytest.mark.full
@pytest.mark.filterwarnings("ignore")
def test_a_directory_equals_transformers(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    folder = make_tiny("llama", tmp_path / "tiny")
    mine, theirs = load_text_model(str(folder)), AutoTokenizer.from_pretrained(str(folder))
    for said in [*SAMPLES, *random_texts(500, seed=2)]:
        assert mine.encode(said) == theirs(said)["input_ids"]
        assert mine.decode(mine.encode(said), False) == theirs.decode(theirs(said)["input_ids"])
    messages = [{"role": "user", "content": "hi"}]
    expected = theirs.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert mine.render_chat(messages) == expected


def test_a_directory_has_its_tokenizer_template_and_eos(tmp_path: Path) -> None:
    folder = make_tiny("qwen2", tmp_path / "tiny")
    mine = load_text_model(str(folder))
    reference = Tokenizer.from_file(str(folder / "tokenizer.json"))
    for said in [*SAMPLES, *random_texts(100, seed=3)]:
        ids = mine.encode(said)
        assert ids == reference.encode(said).ids
        assert mine.decode(ids, False) == reference.decode(ids, skip_special_tokens=False)
    assert mine.eos_token_ids == [1, 3]
    assert mine.render_chat([{"role": "user", "content": "hi"}]).endswith("<|im_start|>assistant\n")


@pytest.mark.parametrize(
    ("pre", "pattern", "ignore_merges", "nfc"), [("llama-bpe", LLAMA3, True, False), ("qwen2", QWEN2, False, True)]
)
def test_byte_level_families_equal_their_hugging_face_tokenizers(
    tmp_path: Path, pre: str, pattern: str, ignore_merges: bool, nfc: bool
) -> None:
    reference = Tokenizer(models.BPE(ignore_merges=ignore_merges))
    if nfc:
        reference.normalizer = normalizers.NFC()
    reference.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(pattern), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    reference.train_from_iterator(
        CORPUS,
        trainers.BpeTrainer(
            vocab_size=420, initial_alphabet=alphabet, special_tokens=["<s>", "</s>"], show_progress=False
        ),
    )
    saved = json.loads(reference.to_str())["model"]
    tokens = sorted(saved["vocab"], key=saved["vocab"].__getitem__)
    path = write_tokenizer_gguf(
        tmp_path / "x.gguf",
        pre=pre,
        tokens=tokens,
        types=[3, 3, *[1] * (len(tokens) - 2)],
        merges=[" ".join(pair) for pair in saved["merges"]],
        bos=0,
        eos=1,
        add_bos=False,
    )
    mine = load_text_model(str(path))
    for said in [*SAMPLES, *CORPUS[:3], "<s>x</s>", *random_texts(200, seed=4)]:
        assert mine.encode(said) == reference.encode(said).ids, said
        composed = normalizers.NFC().normalize_str(said) if nfc else said
        assert mine.decode(mine.encode(said), False) == composed


def test_llama3_adds_bos_unless_the_file_says_no(tmp_path: Path) -> None:
    tokens = ["<s>", "</s>", *pre_tokenizers.ByteLevel.alphabet(), "xy"]
    types = [3, 3, *[1] * 257]
    for add_bos, add_eos, expected in [(None, None, [0]), (False, None, []), (True, True, [0, 1])]:
        path = write_tokenizer_gguf(
            tmp_path / "x.gguf",
            pre="llama3",
            tokens=tokens,
            types=types,
            merges=["x y"],
            bos=0,
            eos=1,
            add_bos=add_bos,
            add_eos=add_eos,
        )
        mine = load_text_model(str(path))
        a = tokens.index("a")
        assert mine.encode("a") == [*expected[:1], a, *expected[1:]]
        assert mine.encode("a", add_special_tokens=False) == [a]
        assert mine.decode(mine.encode("a")) == "a"


PIECES = ["▁", "t", "h", "e", "a", "th", "▁th", "▁the", "he", "▁a", "at", "▁t", "hat", "▁that", "▁▁", "é"]


def sentencepiece_gguf(path: Path, **options: object) -> Path:
    bytes_ = [f"<0x{byte:02X}>" for byte in range(256)]
    tokens = ["<unk>", "<s>", "</s>", "<tool>", *bytes_, *PIECES]
    types = [2, 3, 3, 4, *[6] * 256, *[1] * len(PIECES)]
    scores = [0.0] * 260 + [-float(index) for index in range(len(PIECES))]
    return write_tokenizer_gguf(
        path,
        model="llama",
        tokens=tokens,
        types=types,
        scores=scores,
        bos=1,
        eos=2,
        **options,  # type: ignore[arg-type]
    )


def reference_sentencepiece(said: str) -> list[str]:
    """SentencePiece's BPE by its definition: join the adjacent pair whose piece scores best, until none is a piece."""
    parts = list("▁" + said.replace(" ", "▁"))
    while True:
        pairs = [(PIECES.index(a + b), i) for i, (a, b) in enumerate(pairwise(parts)) if a + b in PIECES]
        if not pairs:
            break
        _, index = min(pairs)
        parts[index : index + 2] = [parts[index] + parts[index + 1]]
    return [
        piece for part in parts for piece in ([part] if part in PIECES else [f"<0x{b:02X}>" for b in part.encode()])
    ]


@pytest.mark.parametrize(
    "said", ["the", "that the", "  a  that", " the", "hat é日🙂", "attthhea", "t\nh", "that<tool>the"]
)
def test_sentencepiece_equals_its_definition(tmp_path: Path, said: str) -> None:
    mine = load_text_model(str(sentencepiece_gguf(tmp_path / "x.gguf")))
    ids = mine.encode(said, add_special_tokens=False)
    spelled = [mine.vocabulary.token_of(token_id) for token_id in ids]
    expected = reference_sentencepiece(said)
    if "<tool>" in said:
        first, second = said.split("<tool>")
        expected = [*reference_sentencepiece(first), "<tool>", *reference_sentencepiece(second)]
        assert spelled == expected
        return
    assert spelled == expected
    assert mine.decode(ids) == said
    assert mine.encode(said) == [1, *ids]


def test_catalogue_3_sentencepiece_output_keeps_its_first_space(tmp_path: Path) -> None:
    mine = load_text_model(str(sentencepiece_gguf(tmp_path / "x.gguf")))
    prompt = mine.encode("the")
    detokenizer = mine.detokenizer(context=prompt)
    assert detokenizer.push(mine.encode("that", add_special_tokens=False)[0]) == " that"


def test_sentencepiece_without_a_space_prefix(tmp_path: Path) -> None:
    mine = load_text_model(str(sentencepiece_gguf(tmp_path / "x.gguf", add_space_prefix=False, add_bos=False)))
    for said in ("the", " the", "  a"):
        assert mine.decode(mine.encode(said)) == said
    assert mine.vocabulary.token_of(mine.encode("the")[0]) in ("th", "t")


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"model": "bert"}, "tokenizer.ggml.model 'bert'"),
        ({"pre": "martian"}, "tokenizer.ggml.pre 'martian'"),
        ({"merges": ["a"]}, "tokenizer.ggml.merges"),
        ({"merges": ["zz yy"]}, "merges do not fit"),
        ({"types": [1]}, "tokenizer.ggml.token_type"),
        ({"bos": 999, "add_bos": True}, "tokenizer.ggml.bos_token_id 999"),
        ({"model": "llama"}, "tokenizer.ggml.scores"),
        ({"chat_template": "{% if %}"}, "chat template does not compile"),
    ],
)
def test_a_broken_gguf_is_one_line_that_names_the_key(tmp_path: Path, change: dict[str, object], named: str) -> None:
    whole: dict[str, object] = {"pre": "gpt-2", "tokens": ["<s>", "a", "b", "ab"], "merges": ["a b"], "bos": 0}
    path = write_tokenizer_gguf(tmp_path / "x.gguf", **{**whole, **change})  # type: ignore[arg-type]
    with pytest.raises(ConfigError) as caught:
        load_text_model(str(path))
    assert named in caught.value.message
    assert "\n" not in caught.value.message


@pytest.mark.parametrize("cut", [3, 20, 200, 2000])
def test_a_cut_gguf_is_refused(tmp_path: Path, cut: int) -> None:
    path = sentencepiece_gguf(tmp_path / "x.gguf")
    path.write_bytes(path.read_bytes()[:cut])
    with pytest.raises(ConfigError):
        load_text_model(str(path))


@pytest.mark.parametrize(
    ("name", "content"), [("tokenizer.json", None), ("tokenizer.json", "{"), ("tokenizer_config.json", "[")]
)
def test_a_broken_directory_is_one_line_that_names_the_file(tmp_path: Path, name: str, content: str | None) -> None:
    folder = make_tiny("llama", tmp_path / "tiny")
    if content is None:
        (folder / name).unlink()
    else:
        (folder / name).write_text(content)
    with pytest.raises(ConfigError, match=name) as caught:
        load_text_model(str(folder))
    assert "\n" not in caught.value.message


def test_a_template_beside_the_tokenizer_wins_over_the_configs(tmp_path: Path) -> None:
    folder = make_tiny("llama", tmp_path / "tiny")
    (folder / "chat_template.jinja").write_text("{{ messages[0].content }}!")
    assert load_text_model(str(folder)).render_chat([{"role": "user", "content": "hi"}]) == "hi!"


def test_no_template_is_a_400_with_the_remedy(tmp_path: Path) -> None:
    mine = load_text_model(str(sentencepiece_gguf(tmp_path / "x.gguf")))
    with pytest.raises(InvalidRequest, match="no chat template"):
        mine.render_chat([{"role": "user", "content": "hi"}])
