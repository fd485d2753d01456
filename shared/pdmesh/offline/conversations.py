"""Conversations of `LLM.chat`: one or several, rendered to prompts."""

from collections.abc import Sequence
from typing import Any

from pdmesh.errors import InvalidRequest
from pdmesh.offline.prompts import GivenPrompt
from pdmesh.openai.intake.messages import check_messages
from pdmesh.openai.text import TextModel

Conversation = list[dict[str, Any]]
"""Messages with `role` and `content`."""


def read_conversations(messages: Conversation | Sequence[Conversation]) -> list[Conversation]:
    """Take one conversation or several. Raises InvalidRequest."""
    if not isinstance(messages, list | tuple) or not messages:
        raise InvalidRequest("messages must be a conversation or a list of conversations", param="messages")
    if all(isinstance(message, dict) for message in messages):
        return [list(messages)]
    if not all(isinstance(conversation, list | tuple) for conversation in messages):
        raise InvalidRequest("messages mixes messages and conversations", param="messages")
    return [list(conversation) for conversation in messages]  # type: ignore[arg-type]


def render(
    text: TextModel,
    conversation: Conversation,
    *,
    add_generation_prompt: bool,
    continue_final_message: bool,
    tools: list[dict[str, Any]] | None,
    variables: dict[str, Any] | None,
) -> GivenPrompt:
    """Render a conversation; the template writes the special tokens. Blocks; raises InvalidRequest."""
    rendered = text.render_chat(
        check_messages(conversation),
        add_generation_prompt=add_generation_prompt,
        continue_final_message=continue_final_message,
        tools=tools,
        variables=variables,
    )
    return GivenPrompt(text=rendered, token_ids=None, add_special_tokens=False)
