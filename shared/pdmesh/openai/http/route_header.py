"""Tells people which way a request went: the `x-pdmesh-route` header and a stream's closing comment."""

from collections.abc import Iterable

from pdmesh.openai.generator import Trace

ROUTE_HEADER = "x-pdmesh-route"
# Proxies in between take heads of 4 KiB and more; the metrics have all of it.
MAX_WHY_CHARS = 1024


def describe_route(traces: Iterable[Trace]) -> str:
    """Name engines, reason, KV source and numbers; what differs between the prompts of a batch is joined with commas."""
    known = list(traces)
    fields = {
        "prefill": _joined(trace.prefill for trace in known),
        "decode": _joined(trace.decode for trace in known),
        "reason": _joined(trace.reason for trace in known),
        "kv": _joined(trace.kv_source for trace in known),
        "kv_bytes": str(sum(trace.kv_bytes for trace in known)),
        "cached": str(sum(trace.cached_tokens for trace in known)),
    }
    fallbacks = _joined(fallback for trace in known for fallback in trace.fallbacks)
    if fallbacks:
        fields["fallbacks"] = fallbacks
    if preempted := _joined(source for trace in known for source in trace.preempted):
        fields["preempted"] = preempted
    if why := _joined(trace.why for trace in known):
        fields["why"] = why[:MAX_WHY_CHARS]
    return "; ".join(f"{name}={value}" for name, value in fields.items())


def _joined(values: Iterable[str]) -> str:
    return ",".join(dict.fromkeys(_header_safe(value) for value in values if value))


def _header_safe(value: str) -> str:
    """A header line is printable ASCII, and ours uses ; and , between values."""
    return "".join(char if char.isascii() and char.isprintable() and char not in ";," else "_" for char in value)
