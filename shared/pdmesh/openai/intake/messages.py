"""Checks chat messages and the chat options around them before the template sees either."""

from typing import Any, Protocol

from pdmesh.errors import InvalidRequest
from pdmesh.openai.schemas.chat import ChatBody

MAX_ROLE_CHARS = 64
TEXT_PART_TYPES = ("text", "input_text", "output_text", "refusal")


class TemplateOptions(Protocol):
    """What chat and /tokenize have in common."""

    @property
    def chat_template(self) -> str | None: ...
    @property
    def chat_template_kwargs(self) -> dict[str, Any] | None: ...
    @property
    def add_generation_prompt(self) -> bool | None: ...
    @property
    def continue_final_message(self) -> bool | None: ...


def check_messages(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the messages with `content` a string, None, or a list of text parts. Raises InvalidRequest."""
    if not messages:
        raise InvalidRequest("messages must have at least one message", param="messages")
    return [_checked(index, message) for index, message in enumerate(messages)]


def check_template_options(options: TemplateOptions) -> None:
    """Refuse templates from clients (they can burn CPU without end) and options that exclude each other."""
    if options.chat_template is not None:
        raise InvalidRequest(
            "chat_template in a request is not accepted; the model's own is used", param="chat_template"
        )
    if "chat_template" in (options.chat_template_kwargs or {}):
        raise InvalidRequest(
            "chat_template in a request is not accepted; the model's own is used", param="chat_template_kwargs"
        )
    if options.continue_final_message and options.add_generation_prompt:
        raise InvalidRequest(
            "Cannot set both `continue_final_message` and `add_generation_prompt` to True.",
            param="continue_final_message",
        )


def check_tools(body: ChatBody) -> None:
    """Without tool parsers, tools may only be shown to the model, with tool_choice "none"."""
    if body.tools is None:
        if body.tool_choice not in (None, "none"):
            raise InvalidRequest("When using `tool_choice`, `tools` must be set.", param="tool_choice")
        return
    if not body.tools:
        raise InvalidRequest("tools must not be an empty list; leave it out instead", param="tools")
    if body.tool_choice != "none":
        name = "tools" if body.tool_choice is None else "tool_choice"
        what = "tools" if body.tool_choice is None else 'tool_choice other than "none"'
        raise InvalidRequest(
            f"{what}: tools are not served yet, as tool calls in the answer would not be parsed; set tool_choice to "
            '"none" to only show the tools to the model',
            param=name,
        )


def _checked(index: int, message: dict[str, Any]) -> dict[str, Any]:
    where = f"messages[{index}]"
    role = message.get("role")
    if not isinstance(role, str) or not role or len(role) > MAX_ROLE_CHARS:
        raise InvalidRequest(
            f"{where}.role must be a string of 1 to {MAX_ROLE_CHARS} characters", param=f"{where}.role"
        )
    content = message.get("content")
    if content is None:
        if role == "assistant" and message.get("tool_calls"):
            return {**message, "content": None}
        raise InvalidRequest(f"{where}.content is required", param=f"{where}.content")
    if isinstance(content, list):
        if not content:
            raise InvalidRequest(f"{where}.content must not be an empty list", param=f"{where}.content")
        parts = [_part(f"{where}.content[{number}]", part) for number, part in enumerate(content)]
        return {**message, "content": parts}
    if not isinstance(content, str):
        raise InvalidRequest(f"{where}.content must be a string or a list of text parts", param=f"{where}.content")
    return message


def _part(where: str, part: Any) -> dict[str, Any]:
    if isinstance(part, str):
        return {"type": "text", "text": part}
    kind = part.get("type") if isinstance(part, dict) else None
    if kind not in TEXT_PART_TYPES:
        shown = kind if isinstance(kind, str) else type(part).__name__
        raise InvalidRequest(f"{where} is of type {shown[:40]!r}; the served model takes text only", param=where)
    value = part.get("refusal" if kind == "refusal" else "text")
    if not isinstance(value, str):
        raise InvalidRequest(f"{where}.text must be a string", param=f"{where}.text")
    return {"type": "text", "text": value}
