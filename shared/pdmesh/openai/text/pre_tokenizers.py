"""How byte-level BPE vocabularies of GGUF files cut text before merging, by `tokenizer.ggml.pre`.

The patterns are the ones the models were trained with; they define the token ids. An unknown name is refused, because
another pattern gives other ids and a worse model without any error.
"""

from dataclasses import dataclass, field

from tokenizers import Regex, normalizers
from tokenizers.pre_tokenizers import ByteLevel, PreTokenizer, Sequence, Split

from pdmesh.errors import ConfigError

GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_WORDS = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_UPPER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]"
_LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_CASED_REST = r" ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
LLAMA3 = rf"{_CONTRACTIONS}|{_WORDS}|\p{{N}}{{1,3}}|{_REST}"
QWEN2 = rf"{_CONTRACTIONS}|{_WORDS}|\p{{N}}|{_REST}"


def _cased(suffix: str) -> str:
    """Words that end where upper case follows lower, as Tekken and o200k cut them."""
    start = r"[^\r\n\p{L}\p{N}]?"
    return f"{start}{_UPPER}*{_LOWER}+{suffix}|{start}{_UPPER}+{_LOWER}*{suffix}"


TEKKEN = rf"{_cased('')}|\p{{N}}|{_CASED_REST}"
O200K = rf"{_cased(_CONTRACTIONS + '?')}|\p{{N}}{{1,3}}|{_CASED_REST}"


@dataclass(frozen=True, slots=True)
class PreTokenization:
    """The cuts of one family. `patterns` are applied one after the other, each to the pieces of the one before."""

    patterns: tuple[str, ...]
    ignore_merges: bool = False
    """A piece that is itself a token is taken whole, whether or not merges lead to it."""
    adds_bos: bool = False
    """Whether BOS is prepended where the file does not say."""
    nfc: bool = False
    """Whether text is composed (Unicode NFC) first."""
    names: tuple[str, ...] = field(default=())


FAMILIES = (
    PreTokenization((GPT2,), names=("gpt-2", "gpt2", "default", "mpt", "olmo", "jais", "phi-2")),
    PreTokenization((r"\p{N}", GPT2), names=("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone")),
    PreTokenization(
        (LLAMA3,),
        ignore_merges=True,
        adds_bos=True,
        names=("llama-bpe", "llama3", "llama-v3"),
    ),
    PreTokenization((QWEN2,), nfc=True, names=("qwen2",)),
    PreTokenization((QWEN2,), names=("deepseek-r1-qwen",)),
    PreTokenization((TEKKEN,), ignore_merges=True, adds_bos=True, names=("tekken",)),
    PreTokenization((O200K,), names=("gpt-4o", "llama4")),
)
BY_NAME = {name: family for family in FAMILIES for name in family.names}


def find_pre_tokenization(name: str) -> PreTokenization:
    """Look up `tokenizer.ggml.pre`; raises ConfigError for one that is not known here."""
    found = BY_NAME.get(name)
    if found is None:
        raise ConfigError(
            f"tokenizer.ggml.pre {name!r} is not supported (known: {', '.join(sorted(BY_NAME))}); "
            "serve the model's Hugging Face directory instead"
        )
    return found


def make_pre_tokenizer(family: PreTokenization) -> PreTokenizer:
    """Build the cuts, then the mapping of bytes to printable characters."""
    steps: list[PreTokenizer] = [Split(Regex(pattern), behavior="isolated") for pattern in family.patterns]
    made: PreTokenizer = Sequence([*steps, ByteLevel(add_prefix_space=False, use_regex=False)])
    return made


def make_normalizer(family: PreTokenization) -> normalizers.Normalizer | None:
    return normalizers.NFC() if family.nfc else None
