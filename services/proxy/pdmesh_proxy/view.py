"""What the router sees of the mesh: an immutable picture of every engine that answers."""

from dataclasses import dataclass

from pdmesh.protocol.capabilities import UNTOLD, Capabilities
from pdmesh.protocol.exchange import KVDescription, KVNames


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineView:
    """One engine at the moment of the picture."""

    address: str
    session_id: str
    """Names the connection; an engine that came back has another one."""
    engine_id: str
    epoch: int
    can_prefill: bool
    """Takes prefill legs."""
    can_decode: bool
    """Takes decode legs and whole requests."""
    model_fingerprint: str
    layout_fingerprints: tuple[str, ...]
    connectors: frozenset[str]
    protocol_min: int
    protocol_max: int
    capabilities: Capabilities = UNTOLD
    description: KVDescription | None = None
    """What it tells of its KV beside the fingerprints."""
    draining: bool = False
    resting: bool = False
    """Failed several requests in a row: used where no other of its kind can be."""
    num_sequences: int = 0
    """Running and waiting, as far as engine and proxy know."""
    max_model_len: int = 0
    """Most tokens of a sequence, prompt and output; 0: not told, so that whatever comes is taken to fit."""
    max_step_tokens: int = 0
    """Most prompt tokens that one of its steps computes; 0: not told."""
    waiting_tokens: int = 0
    """Prompt tokens that must be computed before a new request's turn."""
    kv_usage: float = 0.0
    last_used: int = 0
    """Order in which engines were used; the smallest was used longest ago."""

    @property
    def peer_id(self) -> str:
        """Name of the running process."""
        return f"{self.engine_id}@{self.epoch}"

    @property
    def weights_fingerprint(self) -> str:
        """Of its model whatever the dtype; empty when it does not say."""
        return "" if self.description is None else self.description.weights_fingerprint

    def holds(self, num_tokens: int) -> bool:
        """Whether a sequence of so many tokens fits its context."""
        return not self.max_model_len or num_tokens <= self.max_model_len

    @property
    def names(self) -> KVNames:
        """All that decides with whom it can exchange KV, but for connectors."""
        return KVNames(
            model_fingerprint=self.model_fingerprint,
            layout_fingerprints=self.layout_fingerprints,
            description=self.description,
            capabilities=self.capabilities,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterView:
    """All engines that could be used, and what the operator meant the mesh to have."""

    engines: tuple[EngineView, ...]
    wants_prefill: bool = True
    """Whether prefill targets are configured, so that doing without one is a degradation."""
    wants_decode: bool = True

    def by_peer(self, peer_id: str) -> EngineView | None:
        """Find a running process, draining or not."""
        return next((engine for engine in self.engines if engine.peer_id == peer_id), None)
