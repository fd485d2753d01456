"""Renders a model's own chat template (Jinja) to the prompt's text, the way Hugging Face does, within bounds.

The template comes with the model and is trusted as far as weights are; it still runs in jinja2's immutable sandbox, with a
bound on its output and a deadline, because the messages it loops over come from clients. Blocking: call it in a thread.
"""

import datetime
import json
import secrets
import time
from typing import Any

import jinja2
import jinja2.ext
from jinja2 import nodes
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from pdmesh.errors import ConfigError, DeadlineExceeded, InvalidRequest

MAX_RENDERED_CHARS = 16 << 20
RENDER_TIMEOUT_S = 10.0


class ChatTemplate:
    """A compiled template; rendering shares nothing and may run in any number of threads."""

    def __init__(self, source: str, special_tokens: dict[str, str]) -> None:
        environment = _environment()
        try:
            tree = environment.parse(source)
            self._template = environment.from_string(source)
        except jinja2.TemplateError as exc:
            raise ConfigError(f"the model's chat template does not compile ({exc}); mend or remove it") from exc
        self._special_tokens = special_tokens
        self.wants_parts = _loops_over_content(tree)
        """Whether it takes `content` as a list of parts only."""

    def render(self, messages: list[dict[str, Any]], variables: dict[str, Any]) -> str:
        """Render; `variables` are add_generation_prompt, tools and whatever else the template reads.

        Raises InvalidRequest when the template refuses the messages or grows out of bounds, DeadlineExceeded when it
        takes too long.
        """
        deadline = time.monotonic() + RENDER_TIMEOUT_S
        num_chars, pieces = 0, []
        try:
            for piece in self._template.generate({**self._special_tokens, **variables, "messages": messages}):
                num_chars += len(piece)
                if num_chars > MAX_RENDERED_CHARS:
                    raise InvalidRequest(
                        f"the chat template renders to over {MAX_RENDERED_CHARS} characters", param="messages"
                    )
                if time.monotonic() > deadline:
                    raise DeadlineExceeded(f"the chat template took over {RENDER_TIMEOUT_S:g} s")
                pieces.append(piece)
        except jinja2.TemplateError as exc:
            raise InvalidRequest(f"the chat template refuses these messages: {exc}", param="messages") from exc
        except (TypeError, ValueError, LookupError, AttributeError, ArithmeticError, RecursionError) as exc:
            # What template code raises when a message lacks what it reads.
            raise InvalidRequest(f"the chat template cannot render these messages: {exc}", param="messages") from exc
        return "".join(pieces)

    def render_open(self, messages: list[dict[str, Any]], variables: dict[str, Any]) -> str:
        """Render so that the text ends with the last message's content, for the model to continue it."""
        marker = f"<{secrets.token_hex(16)}>"
        text = self.render([*messages[:-1], _marked(messages[-1], marker)], variables)
        before, found, _ = text.rpartition(marker)
        if not found:
            raise InvalidRequest(
                "continue_final_message: the chat template does not show the last message's content",
                param="continue_final_message",
            )
        return before


def _marked(message: dict[str, Any], marker: str) -> dict[str, Any]:
    content = message["content"]
    if isinstance(content, list):
        last = content[-1]
        return {**message, "content": [*content[:-1], {**last, "text": last["text"] + marker}]}
    return {**message, "content": (content or "") + marker}


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """jinja2's own filter escapes HTML, which models were not trained on."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(style: str) -> str:
    return datetime.datetime.now().strftime(style)


class _GenerationTag(jinja2.ext.Extension):
    """`{% generation %}…{% endgeneration %}` marks assistant text for training; for serving its body is all there is."""

    tags = {"generation"}  # noqa: RUF012 - as in the base class

    def parse(self, parser: Parser) -> nodes.Node | list[nodes.Node]:
        lineno = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=lineno)


def _loops_over_content(tree: nodes.Template) -> bool:
    """Tell whether the template iterates over `content` without ever asking if it is a string."""
    if any(test.name == "string" for test in tree.find_all(nodes.Test)):
        return False
    return any(_is_content(loop.iter) for loop in tree.find_all(nodes.For))


def _is_content(expression: nodes.Node) -> bool:
    if isinstance(expression, nodes.Getattr):
        return expression.attr == "content"
    if isinstance(expression, nodes.Getitem):
        return isinstance(expression.arg, nodes.Const) and expression.arg.value == "content"
    return False
