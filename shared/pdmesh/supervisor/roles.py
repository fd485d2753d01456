"""The kinds of process in a mesh."""

from enum import StrEnum


class Role(StrEnum):
    VALKEY = "valkey"
    KVCACHE = "kvcache"
    PREFILL = "prefill"
    DECODE = "decode"
    PROXY = "proxy"


ENGINE_ROLES = (Role.PREFILL, Role.DECODE)

DRAIN_ORDER: tuple[tuple[Role, ...], ...] = ((Role.PROXY,), ENGINE_ROLES, (Role.KVCACHE,), (Role.VALKEY,))
"""Who stops when: the door first, then those who still work for requests that had come in."""
