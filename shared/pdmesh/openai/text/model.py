"""What turns text into token ids and back for one model; the only part of pdmesh that knows its language."""

import copy
from typing import Any

from tokenizers import Tokenizer

from pdmesh.errors import InvalidRequest
from pdmesh.openai.text.chat_template import ChatTemplate
from pdmesh.openai.text.detokenizer import Detokenizer, make_detokenizer
from pdmesh.openai.text.vocabulary import Vocabulary

# Where tokens may stand for unknown text of any length, a prompt is not refused for the characters it has per token.
MIN_CHARS_PER_TOKEN = 16


class TextModel:
    """Tokenizer and chat template. Stateless after construction: every method may be called from any thread."""

    def __init__(
        self,
        *,
        name: str,
        tokenizer: Tokenizer,
        eos_token_ids: list[int],
        chat_template: str | None = None,
        special_tokens: dict[str, str] | None = None,
    ) -> None:
        self.name = name
        self.eos_token_ids = eos_token_ids
        self._tokenizer = tokenizer
        self.vocabulary = Vocabulary(tokenizer)
        self._special_tokens = special_tokens or {}
        self._template = ChatTemplate(chat_template, self._special_tokens) if chat_template else None

    def with_chat_template(self, source: str) -> "TextModel":
        """Return the same model with another chat template. Raises ConfigError when it does not compile."""
        other = copy.copy(self)
        other._template = ChatTemplate(source, self._special_tokens)
        return other

    @property
    def vocab_size(self) -> int:
        """Ids below it mean something; the model's own vocabulary may be padded beyond."""
        return self.vocabulary.size

    @property
    def max_chars_per_token(self) -> int:
        """A text with more characters than this times a limit of tokens is over that limit."""
        return max(self.vocabulary.longest_token_chars, MIN_CHARS_PER_TOKEN)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Tokenise; special tokens written out in `text` are recognised. 1 MB takes seconds: use a thread."""
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=add_special_tokens).ids
        return ids

    def decode(self, token_ids: list[int], skip_special_tokens: bool = True) -> str:
        """Return the text of `token_ids` from the start of a text; a broken character becomes U+FFFD."""
        detokenizer = self.detokenizer(skip_special_tokens=skip_special_tokens)
        return "".join([*map(detokenizer.push, token_ids), detokenizer.finish()])

    def detokenizer(self, *, context: list[int] | None = None, skip_special_tokens: bool = True) -> Detokenizer:
        """Decode incrementally what follows `context` (None: the start of a text)."""
        return make_detokenizer(self._tokenizer, self.vocabulary, context or [], skip_special_tokens)

    def render_chat(
        self,
        messages: list[dict[str, Any]],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: list[dict[str, Any]] | None = None,
        documents: list[dict[str, Any]] | None = None,
        variables: dict[str, Any] | None = None,
    ) -> str:
        """Render checked messages (`content` str, None or a list of text parts) to the prompt's text. Blocks.

        Raises InvalidRequest when the model has no chat template or the template refuses.
        """
        if self._template is None:
            raise InvalidRequest(
                f"The model {self.name} has no chat template, so chat messages cannot become a prompt; "
                "use /v1/completions, or serve a model directory with a chat_template.jinja",
                param="messages",
            )
        shaped = [_shape(message, self._template.wants_parts) for message in messages]
        values = {
            **(variables or {}),
            "tools": tools,
            "documents": documents,
            "add_generation_prompt": add_generation_prompt,
        }
        render = self._template.render_open if continue_final_message else self._template.render
        return render(shaped, values)


def _shape(message: dict[str, Any], wants_parts: bool) -> dict[str, Any]:
    """Give `content` the form the template reads: one string, or a list of text parts."""
    content = message.get("content")
    if wants_parts and isinstance(content, str):
        return {**message, "content": [{"type": "text", "text": content}]}
    if not wants_parts and isinstance(content, list):
        return {**message, "content": "\n".join(part["text"] for part in content)}
    return message
