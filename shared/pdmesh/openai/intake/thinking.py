"""`thinking_token_budget`: the most tokens between what opens a thinking section and what closes it."""

from dataclasses import dataclass

from pdmesh.config import HttpConfig
from pdmesh.errors import ConfigError
from pdmesh.openai.intake.refusal import refuse
from pdmesh.openai.text import TextModel
from pdmesh.protocol.messages import ThinkingBudget

FIELD = "thinking_token_budget"
MAX_BUDGET = (1 << 31) - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class ThinkingTokens:
    """`reasoning_start_str` and `reasoning_end_str` as the model's tokens."""

    start: list[int]
    end: list[int]


def thinking_tokens(config: HttpConfig, text: TextModel) -> ThinkingTokens | None:
    """Return the tokens of the configured section; None without one. Raises ConfigError for what has no tokens."""
    if not config.reasoning_start_str:
        return None
    start = text.encode(config.reasoning_start_str, add_special_tokens=False)
    end = text.encode(config.reasoning_end_str, add_special_tokens=False)
    for name, shown, ids in (("start", config.reasoning_start_str, start), ("end", config.reasoning_end_str, end)):
        if not ids:
            raise ConfigError(f"reasoning-{name}-str {shown!r} has no tokens in this model's vocabulary")
    return ThinkingTokens(start=start, end=end)


def resolve_thinking(budget: int | None, tokens: ThinkingTokens | None) -> ThinkingBudget | None:
    """Check the field; None and -1 are no limit. Raises InvalidRequest."""
    if budget is None or budget == -1:
        return None
    if not 0 <= budget <= MAX_BUDGET:
        refuse(FIELD, f"{FIELD} must be between 0 and {MAX_BUDGET}, or -1 for no limit, got {budget}.", budget)
    if tokens is None:
        refuse(
            FIELD,
            f"{FIELD} needs to know where thinking begins and ends: the server was started without --reasoning-start-str and "
            "--reasoning-end-str.",
            budget,
        )
    return ThinkingBudget(budget=budget, start_token_ids=tokens.start, end_token_ids=tokens.end)
