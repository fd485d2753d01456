"""How many tokens a leg needs an engine's context to hold: a proxy routes by it, an engine refuses by it."""


def tokens_to_hold(num_prompt: int, max_tokens: int, *, num_emitted: int, prefill_only: bool) -> int:
    """Prompt and output, so that the engine does not end the leg early as if it were done.

    A prefill leg needs the token it samples behind the `num_emitted`, and room for one more: a full context is an end too.
    """
    return num_prompt + (min(max_tokens, num_emitted + 2) if prefill_only else max_tokens)
