"""Turns a growing list of token ids into text, token by token.

A character that spans tokens appears whole with its last token, never in halves. The text of all tokens, and then
`finish()`, joined, is what decoding them at once gives. Each token costs the same however long the output is.
"""

import codecs
from abc import ABC, abstractmethod

from tokenizers import Tokenizer

from pdmesh.openai.text.vocabulary import Spelling, Vocabulary

REPLACEMENT = "\ufffd"
# A UTF-8 character has at most 4 bytes, so at most 4 tokens; the rest is room for skipped special ones.
NUM_CONTEXT_TOKENS = 8
# An OTHER decoder that has said nothing whole for so many tokens never will.
MAX_UNDECIDED_TOKENS = 16


class Detokenizer(ABC):
    """One choice's incremental decoding; not shared between choices."""

    @abstractmethod
    def push(self, token_id: int) -> str:
        """Take the next token; return the text that is now certain."""

    @abstractmethod
    def peek(self, token_id: int) -> str:
        """Return what `push` would, without taking the token."""

    @abstractmethod
    def finish(self) -> str:
        """Return the replacement character if the tokens end inside a character, else ""."""


def make_detokenizer(
    tokenizer: Tokenizer, vocabulary: Vocabulary, context: list[int], skip_special_tokens: bool
) -> Detokenizer:
    """Make one that continues after `context` (the prompt), whose text it does not repeat; [] is the start of a text."""
    made: Detokenizer
    if vocabulary.spelling is Spelling.OTHER:
        made = _WindowDetokenizer(tokenizer, vocabulary, skip_special_tokens)
    else:
        made = _ByteDetokenizer(vocabulary, skip_special_tokens)
    for token_id in context[-NUM_CONTEXT_TOKENS:]:
        made.push(token_id)
    return made


class _ByteDetokenizer(Detokenizer):
    """For vocabularies whose tokens are bytes: the text is the UTF-8 decoding of their concatenation."""

    def __init__(self, vocabulary: Vocabulary, skip_special_tokens: bool) -> None:
        self._vocabulary = vocabulary
        self._skipped = vocabulary.special_ids if skip_special_tokens else frozenset()
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._strip_next = vocabulary.strips_first_space

    def push(self, token_id: int) -> str:
        if token_id in self._skipped:
            return ""
        text = self._decoder.decode(self._vocabulary.bytes_of(token_id))
        if self._strip_next and text:
            self._strip_next = False
            return text.removeprefix(" ")
        return text

    def peek(self, token_id: int) -> str:
        state, strip_next = self._decoder.getstate(), self._strip_next
        text = self.push(token_id)
        self._decoder.setstate(state)
        self._strip_next = strip_next
        return text

    def finish(self) -> str:
        return self._decoder.decode(b"", final=True)


class _WindowDetokenizer(Detokenizer):
    """For any other decoder: decode a short window with and without the new token; the difference is the new text."""

    def __init__(self, tokenizer: Tokenizer, vocabulary: Vocabulary, skip_special_tokens: bool) -> None:
        self._tokenizer = tokenizer
        self._skipped = vocabulary.special_ids if skip_special_tokens else frozenset()
        self._window: list[int] = []
        self._num_told = 0
        """Tokens of the window whose text is out."""

    def push(self, token_id: int) -> str:
        if token_id in self._skipped:
            return ""
        self._window.append(token_id)
        text = self._untold()
        if text.endswith(REPLACEMENT) and len(self._window) - self._num_told < MAX_UNDECIDED_TOKENS:
            return ""
        self._told()
        return text

    def peek(self, token_id: int) -> str:
        window, num_told = self._window.copy(), self._num_told
        text = self.push(token_id)
        self._window, self._num_told = window, num_told
        return text

    def finish(self) -> str:
        text = self._untold()
        self._told()
        return text

    def _untold(self) -> str:
        before = self._tokenizer.decode(self._window[: self._num_told], skip_special_tokens=False)
        return self._tokenizer.decode(self._window, skip_special_tokens=False)[len(before) :]

    def _told(self) -> None:
        self._window = self._window[-NUM_CONTEXT_TOKENS:]
        self._num_told = len(self._window)
