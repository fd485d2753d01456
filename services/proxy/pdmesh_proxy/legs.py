"""What a request may ask of one engine, and why a request that was meant for two was served by one."""

from enum import StrEnum

from pdmesh_proxy.metrics import Stage


class LegKind(StrEnum):
    """What a request asks of one engine."""

    PREFILL = "prefill"
    """Compute the prompt, sample first tokens, offer the KV."""
    DECODE = "decode"
    """Fetch the offered KV and go on."""
    WHOLE = "whole"
    """Compute what is missing and generate, all in one place."""


class Fallback(StrEnum):
    """Why a request that was meant to be disaggregated was not."""

    NO_PREFILL = "no_prefill"
    NO_DECODE = "no_decode"
    NO_PAIR = "no_compatible_pair"
    PREFILL_EXCLUDED = "prefill_excluded"
    DECODE_EXCLUDED = "decode_excluded"
    PREFILL_CONTEXT = "prefill_context"
    DECODE_CONTEXT = "decode_context"
    LEG_FAILED = "leg_failed"
    """Prefill or decode failed it before the KV had moved, and one engine computed it anew."""
    NO_TICKET = "no_ticket"
    """Prefill ended without an offer, or the offer ended before decode came for it."""
    RECOMPUTE = "recompute"
    """Decode could not fetch the KV and computed it itself."""


STAGE_OF_FIRST_TOKEN = {
    LegKind.PREFILL: Stage.PREFILL,
    LegKind.DECODE: Stage.FIRST_DECODE,
    LegKind.WHOLE: Stage.WHOLE,
}
