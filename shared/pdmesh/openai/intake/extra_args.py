"""`vllm_xargs`: what a request hands to custom logits processors."""

from typing import Any

from pdmesh.openai.intake.refusal import refuse
from pdmesh.protocol.messages import ExtraArgs
from pdmesh.protocol.wire import MAX_EXTRA_ARGS_BYTES, encode_extra_args

FIELD = "vllm_xargs"
MIN_INTEGER, MAX_INTEGER = -(1 << 63), (1 << 64) - 1


def resolve_extra_args(args: dict[str, Any] | None) -> ExtraArgs:
    """Check the field: names to numbers, strings, true and false, or lists of numbers and strings. Raises InvalidRequest."""
    if not args:
        return {}
    for name, value in args.items():
        for item in value if isinstance(value, list) else [value]:
            _check_item(name, item, in_list=isinstance(value, list))
    size = len(encode_extra_args(args))
    if size > MAX_EXTRA_ARGS_BYTES:
        refuse(FIELD, f"{FIELD} must take at most {MAX_EXTRA_ARGS_BYTES} bytes as MessagePack, got {size}.")
    return args


def _check_item(name: str, item: Any, *, in_list: bool) -> None:
    if isinstance(item, bool):
        if not in_list:
            return
    elif isinstance(item, int):
        if not MIN_INTEGER <= item <= MAX_INTEGER:
            refuse(FIELD, f"{FIELD}: the integers must be between -2**63 and 2**64 - 1, got {item} for {name[:40]!r}.")
        return
    elif isinstance(item, float | str):
        return
    refuse(
        FIELD,
        f"{FIELD}: {name[:40]!r} must be a number, a string, true or false, or a list of numbers and strings, "
        f"got {type(item).__name__}{' in a list' if in_list else ''}.",
    )
