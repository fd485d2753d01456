"""What no engine that is well says of a request: seen before it reaches a client, a metric's labels or the tokeniser."""

from collections.abc import Iterable

from pdmesh.protocol.messages import ChoiceDelta, TokenLogprobs

# Words of ours and of later releases; what is longer, or no word, is none.
MAX_WORD_CHARS = 128


def nonsense(delta: ChoiceDelta, vocab_size: int) -> str:
    """Name the field of a delta that makes no sense, with its limit; empty when all do. `vocab_size` is the engine's own."""
    for field, word in (("finish_reason", delta.finish_reason), ("kv_source", delta.kv_source)):
        if len(word) > MAX_WORD_CHARS or not (word.isascii() and word.isprintable()):
            return f"{field} has {len(word)} characters, at most {MAX_WORD_CHARS} printable ones make a word"
    listed = [*delta.token_ids, *_ids(delta.logprobs)]
    if delta.stop_token_id is not None:
        listed.append(delta.stop_token_id)
    if delta.prompt_logprobs is not None:
        listed += _ids(entry for entry in delta.prompt_logprobs if entry is not None)
    if listed and max(listed) >= vocab_size > 0:
        return f"token {max(listed)} is outside 0…{vocab_size - 1}"
    return ""


def _ids(entries: Iterable[TokenLogprobs]) -> list[int]:
    return [token_id for entry in entries for token_id in entry.token_ids]
