"""Chat templates: Hugging Face's dialect, the sandbox, the bounds."""

import re
from typing import Any

import pytest

from pdmesh.errors import ConfigError, DeadlineExceeded, InvalidRequest
from pdmesh.openai.text import chat_template
from pdmesh.openai.text.chat_template import ChatTemplate

HI = [{"role": "user", "content": "hi"}]


def render(source: str, messages: list[dict[str, Any]] | None = None, **variables: Any) -> str:
    return ChatTemplate(source, {"bos_token": "<s>"}).render(messages or HI, variables)


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("{{ bos_token }}{{ messages[0]['content'] }}", "<s>hi"),
        ("{% for m in messages %}\n  {% if true %}\nx\n  {% endif %}\n{% endfor %}", "x\n"),
        ("{% for i in range(9) %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}", "01"),
        ("{{ {'a': 'é<'} | tojson }}", '{"a": "é<"}'),
        ("{{ [1, 2] | tojson(indent=1) }}", "[\n 1,\n 2\n]"),
        ("{% generation %}{{ messages[0].content }}{% endgeneration %}", "hi"),
        ("{{ tools is none }}{{ missing is defined }}", "TrueFalse"),
        ("{% set ns = namespace(x=1) %}{% set ns.x = 2 %}{{ ns.x }}", "2"),
    ],
)
def test_templates_mean_what_they_mean_in_transformers(source: str, expected: str) -> None:
    assert render(source, tools=None) == expected


def test_the_date_is_todays() -> None:
    assert re.fullmatch(r"\d{4}-\d\d-\d\d", render("{{ strftime_now('%Y-%m-%d') }}"))


@pytest.mark.parametrize(
    "source",
    [
        "{{ raise_exception('roles must alternate') }}",
        "{{ messages[5].content }}",
        "{{ messages[0].content + 1 }}",
        "{{ 1 / 0 }}",
        "{{ messages[0].tool_calls[0].function.name }}",
        "{{ ''.__class__.__mro__ }}{{ messages.append(1) }}",
        "{{ range(1000000000) | list }}",
    ],
)
def test_what_a_template_cannot_do_is_the_requests_fault(source: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        render(source)
    assert caught.value.param == "messages"


def test_a_template_that_does_not_compile_is_found_at_start_up() -> None:
    with pytest.raises(ConfigError, match="does not compile"):
        ChatTemplate("{% for %}", {})


def test_output_and_time_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    endless = (
        "{% for a in range(90000) %}{% for b in range(90000) %}xxxxxxxxxxxxxxxxxxxx{{ b }}{% endfor %}{% endfor %}"
    )
    monkeypatch.setattr(chat_template, "MAX_RENDERED_CHARS", 100_000)
    with pytest.raises(InvalidRequest, match="100000 characters"):
        render(endless)
    monkeypatch.setattr(chat_template, "MAX_RENDERED_CHARS", 1 << 40)
    monkeypatch.setattr(chat_template, "RENDER_TIMEOUT_S", 0.05)
    with pytest.raises(DeadlineExceeded):
        render(endless)


@pytest.mark.parametrize(
    ("source", "wants_parts"),
    [
        ("{% for m in messages %}{{ m.content }}{% endfor %}", False),
        ("{% for m in messages %}{% for part in m['content'] %}{{ part.text }}{% endfor %}{% endfor %}", True),
        (
            "{% for m in messages %}{% if m.content is string %}{{ m.content }}{% else %}"
            "{% for part in m.content %}{{ part.text }}{% endfor %}{% endif %}{% endfor %}",
            False,
        ),
    ],
)
def test_the_form_of_content_follows_the_template(source: str, wants_parts: bool) -> None:
    assert ChatTemplate(source, {}).wants_parts is wants_parts


def test_an_open_message_ends_where_its_content_does() -> None:
    template = ChatTemplate("{% for m in messages %}[{{ m.content | trim }}]{% endfor %}{{ 'end' }}", {})
    messages = [*HI, {"role": "assistant", "content": "so "}]
    assert template.render_open(messages, {}) == "[hi][so "
    with pytest.raises(InvalidRequest, match="continue_final_message"):
        ChatTemplate("{{ messages[0].content }}", {}).render_open(messages, {})
