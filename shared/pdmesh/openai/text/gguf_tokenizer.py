"""Builds a tokenizer from what a GGUF file says: byte-level BPE (`gpt2`) and SentencePiece BPE (`llama`).

The proxy needs neither torch nor transformers for it. Token types are llama.cpp's: control tokens are special, user-defined
ones are matched before any merging, byte tokens are the fallback for characters without a token.
"""

from collections.abc import Iterable
from enum import IntEnum

from tokenizers import AddedToken, Tokenizer, decoders, normalizers
from tokenizers.models import BPE
from tokenizers.processors import TemplateProcessing

from pdmesh.errors import ConfigError
from pdmesh.models.source import GGUFMetadata
from pdmesh.openai.text.pre_tokenizers import find_pre_tokenization, make_normalizer, make_pre_tokenizer
from pdmesh.openai.text.vocabulary import SP_SPACE


class TokenType(IntEnum):
    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


SPECIAL_TYPES = (TokenType.UNKNOWN, TokenType.CONTROL)
ADDED_TYPES = (*SPECIAL_TYPES, TokenType.USER_DEFINED)


def build_gguf_tokenizer(metadata: GGUFMetadata) -> Tokenizer:
    """Build from the file's key-values. Raises ConfigError, one line, for what is missing, broken or not supported."""
    model = metadata.text("tokenizer.ggml.model")
    tokens = metadata.strings("tokenizer.ggml.tokens")
    if not tokens:
        raise ConfigError(f"{metadata.path}: tokenizer.ggml.tokens is empty; use another file")
    if model == "gpt2":
        tokenizer, adds_bos = _byte_level(metadata, tokens)
    elif model == "llama":
        tokenizer, adds_bos = _sentencepiece(metadata, tokens), True
    else:
        raise ConfigError(
            f"{metadata.path}: tokenizer.ggml.model {model!r} is not supported (gpt2 and llama are); "
            "serve the model's Hugging Face directory instead"
        )
    _add_tokens(tokenizer, tokens, _types(metadata, len(tokens)))
    _add_ends(tokenizer, metadata, tokens, adds_bos)
    return tokenizer


def _byte_level(metadata: GGUFMetadata, tokens: list[str]) -> tuple[Tokenizer, bool]:
    family = find_pre_tokenization(metadata.text("tokenizer.ggml.pre", "default"))
    merges = [_pair(metadata, merge) for merge in metadata.strings("tokenizer.ggml.merges")]
    tokenizer = _bpe(metadata, _ids(tokens), merges, ignore_merges=family.ignore_merges)
    normalizer = make_normalizer(family)
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    tokenizer.pre_tokenizer = make_pre_tokenizer(family)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer, family.adds_bos


def _sentencepiece(metadata: GGUFMetadata, tokens: list[str]) -> Tokenizer:
    scores = metadata.get("tokenizer.ggml.scores")
    if not isinstance(scores, list) or len(scores) != len(tokens):
        raise ConfigError(f"{metadata.path}: tokenizer.ggml.scores must have one number per token; use another file")
    types = _types(metadata, len(tokens))
    vocab = _ids(tokens)
    unknown = next((tokens[index] for index, kind in enumerate(types) if kind == TokenType.UNKNOWN), None)
    merges = _merges_from_scores(vocab, tokens, [float(score) for score in scores], types)
    tokenizer = _bpe(metadata, vocab, merges, unk_token=unknown, fuse_unk=True, byte_fallback=TokenType.BYTE in types)
    spaces = normalizers.Replace(" ", SP_SPACE)
    steps: list[decoders.Decoder] = [decoders.Replace(SP_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    if metadata.get("tokenizer.ggml.add_space_prefix") is not False:
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend(SP_SPACE), spaces])
        steps.append(decoders.Strip(" ", 1, 0))
    else:
        tokenizer.normalizer = spaces
    tokenizer.decoder = decoders.Sequence(steps)
    return tokenizer


def _bpe(metadata: GGUFMetadata, vocab: dict[str, int], merges: list[tuple[str, str]], **options: object) -> Tokenizer:
    try:
        return Tokenizer(BPE(vocab=vocab, merges=merges, **options))
    except Exception as exc:
        # tokenizers raises bare Exception for a merge of tokens that do not exist.
        raise ConfigError(
            f"{metadata.path}: the tokenizer's merges do not fit its tokens ({exc}); use another file"
        ) from exc


def _merges_from_scores(
    vocab: dict[str, int], tokens: list[str], scores: list[float], types: list[int]
) -> list[tuple[str, str]]:
    """Every way to make a token from two others, best score first: the order in which SentencePiece would merge."""
    found: list[tuple[float, int, int, str, str]] = []
    for index, token in enumerate(tokens):
        if types[index] != TokenType.NORMAL:
            continue
        for cut in range(1, len(token)):
            left, right = token[:cut], token[cut:]
            if left in vocab and right in vocab:
                found.append((-scores[index], vocab[left], vocab[right], left, right))
    found.sort()
    return [(left, right) for *_, left, right in found]


def _ids(tokens: list[str]) -> dict[str, int]:
    """Map token to id; where a file repeats a token the first id stands."""
    vocab: dict[str, int] = {}
    for index, token in enumerate(tokens):
        vocab.setdefault(token, index)
    return vocab


def _types(metadata: GGUFMetadata, num_tokens: int) -> list[int]:
    if metadata.get("tokenizer.ggml.token_type") is None:
        return [TokenType.NORMAL] * num_tokens
    types = metadata.integers("tokenizer.ggml.token_type")
    if len(types) != num_tokens:
        raise ConfigError(f"{metadata.path}: tokenizer.ggml.token_type must have one entry per token; use another file")
    return types


def _pair(metadata: GGUFMetadata, merge: str) -> tuple[str, str]:
    # A token may start with a space only in vocabularies that are not byte-level; there is one separating space.
    left, space, right = merge.partition(" ")
    if not (left and space and right):
        raise ConfigError(f"{metadata.path}: tokenizer.ggml.merges holds {merge[:40]!r}, not a pair; use another file")
    return left, right


def _add_tokens(tokenizer: Tokenizer, tokens: list[str], types: list[int]) -> None:
    added = [(token, kind) for token, kind in zip(tokens, types, strict=True) if kind in ADDED_TYPES and token]
    special = [_added(token, True) for token, kind in added if kind in SPECIAL_TYPES]
    plain = [_added(token, False) for token, kind in added if kind == TokenType.USER_DEFINED]
    tokenizer.add_special_tokens(special)
    tokenizer.add_tokens(plain)


def _added(token: str, special: bool) -> AddedToken:
    return AddedToken(token, special=special, normalized=False)


def _add_ends(tokenizer: Tokenizer, metadata: GGUFMetadata, tokens: list[str], adds_bos: bool) -> None:
    """Put BOS before and EOS after a text where the file (or the family) says so."""
    bos = _end(metadata, tokens, "bos", adds_bos)
    eos = _end(metadata, tokens, "eos", False)
    if not bos and not eos:
        return
    single = [*bos, "$A", *eos]
    pieces = [(token, tokenizer.token_to_id(token)) for token in _unique([*bos, *eos])]
    tokenizer.post_processor = TemplateProcessing(
        single=" ".join(single), pair=" ".join([*single, *bos, "$B", *eos]), special_tokens=pieces
    )


def _end(metadata: GGUFMetadata, tokens: list[str], name: str, default: bool) -> list[str]:
    token_id = metadata.get(f"tokenizer.ggml.{name}_token_id")
    wanted = metadata.get(f"tokenizer.ggml.add_{name}_token")
    if not (default if wanted is None else wanted) or not isinstance(token_id, int):
        return []
    if not 0 <= token_id < len(tokens):
        raise ConfigError(f"{metadata.path}: tokenizer.ggml.{name}_token_id {token_id} is no token; use another file")
    return [tokens[token_id]]


def _unique(tokens: Iterable[str]) -> list[str]:
    return list(dict.fromkeys(tokens))
