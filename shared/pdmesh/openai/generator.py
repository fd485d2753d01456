"""The seam between the OpenAI layer and whatever generates: the mesh (proxy) or one engine (its own HTTP port)."""

from abc import ABC, abstractmethod
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

from pdmesh.protocol.messages import ChoiceDelta, SamplingParams

DIRECT = "direct"
"""Reason in the debug header of a request that came to its engine without a mesh."""
BEAM_SEARCH = "beam_search"
"""Reason in the debug header of a request that one engine serves whole because it is a beam search."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelCard:
    """What the API says of the served model."""

    name: str
    root: str
    max_model_len: int
    created_s: int
    vocab_size: int
    aliases: tuple[str, ...] = ()


@dataclass(slots=True, kw_only=True)
class Trace:
    """Filled in while a request runs; becomes the debug header and the request's one log line."""

    prefill: str = ""
    """engine_id that prefilled, "" when none did."""
    decode: str = ""
    model_fingerprint: str = ""
    """Of the model that serves it, where a mesh may come to serve another one; else empty."""
    reason: str = ""
    """Why it was routed so."""
    why: str = ""
    """What more there is to say of the reason: which engines cannot exchange KV, what differs, and the settings to look at."""
    kv_source: str = ""
    kv_bytes: int = 0
    cached_tokens: int = 0
    fallbacks: list[str] = field(default_factory=list)
    preempted: list[str] = field(default_factory=list)
    """Where the KV came from, each time that an engine had preempted it: local, tier, offer, prefill or recompute."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenRequest:
    """A validated, tokenised request, before anyone decided who serves it."""

    request_id: str
    token_ids: list[int]
    sampling: SamplingParams
    cache_salt: str = ""
    """Already narrowed by the caller's identity."""
    priority: int = 0
    deadline_s: float = 600.0
    kv_transfer_params: dict[str, object] | None = None
    """vLLM's names; only engines' HTTP ports accept them."""
    beam_search: bool = False
    """A step of a beam search: one engine serves it whole, and the next steps profit from its prefix cache."""
    preferred_engine: str = ""
    """engine_id that served the step before; another one is taken when it cannot serve."""
    model_fingerprint: str = ""
    """Of the model that served the step before: no other serves this one. Empty: any."""
    trace: Trace = field(default_factory=Trace)


class Generator(ABC):
    @abstractmethod
    async def card(self) -> ModelCard:
        """Describe the served model; raises PeerUnavailable while no engine is known."""

    @abstractmethod
    def generate(self, request: TokenRequest) -> AsyncIterator[ChoiceDelta]:
        """Yield deltas until every choice has a finish_reason. `sampling.n` choices, interleaved, each in order.

        Closing the iterator (or cancelling its task) aborts the request. Raises MeshError when it fails before or
        between deltas; after that nothing more comes.
        """

    @abstractmethod
    async def abort_choice(self, request_id: str, choice: int) -> None:
        """Stop one choice whose text hit a stop string; the others go on. The choice yields nothing more."""

    @abstractmethod
    async def problem(self) -> str:
        """Why no request could be served now; empty when one could."""

    async def healthy(self) -> bool:
        """Whether a request could be served now."""
        return not await self.problem()

    def refused(self, params: dict[str, object]) -> None:  # noqa: B027
        """Take note that a request with these `kv_transfer_params` did not come to `generate`; never blocks."""

    def transfer_params(self, request_id: str) -> dict[str, object] | None:
        """vLLM's `kv_transfer_params` for the answer of a request that asked for `do_remote_decode`; else None."""
        return None
