"""What crosses the ZMQ boundary between an engine's server process and its core process (msgpack, tagged).

The server process never sees a tensor; the core never sees a socket to another service. Requests themselves are
`protocol.messages.GenerateRequest`, answers `ChoiceDelta`.
"""

from enum import StrEnum

import msgspec

from pdmesh.engine.push_messages import (
    BeginPush,
    EndPush,
    ExpectPush,
    LandingReport,
    PushArrived,
    PushExpected,
    PushReport,
    ShutOutWriters,
    StopPush,
    WritersShutOut,
)
from pdmesh.engine.stats import Stats
from pdmesh.protocol.exchange import KVDescription
from pdmesh.protocol.layout import Layout
from pdmesh.protocol.messages import NO_MARKS, ChoiceDelta, GenerateRequest, GroupBlocks, KVMarks, KVSource

# ---- server -> core ------------------------------------------------------------------------------


class AddRequest(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    request: GenerateRequest
    offer_id: str = ""
    """Not empty: keep the prompt's blocks for this offer when the prompt is computed, until ReleaseOffer."""
    source: KVSource | None = None
    """KV to pull first (a ticket's or the tier's)."""
    block_keys: list[bytes] = []
    """Keys of the prompt's full blocks, when the server has computed them already (32 bytes each)."""
    recompute_last: bool = False
    """With a source: recompute the last prompt token and sample from it (the stock vLLM flow, no emitted tokens)."""
    store_to_tier: bool = False
    """Report newly computed full prompt blocks as BlocksComputed."""
    may_refetch: bool = False
    """After a preemption the server may know a source: ask for it with NeedsSource."""
    push_id: str = ""
    """Transfer id of the push that was expected for it; empty: none."""
    digest: bytes = b""
    """`request_digest` of the prompt, where an offer is made of it or awaited."""


class HoldRequest(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Take a request in when its offer's owner gives notice of it. An AddRequest or a DropHeld of the same id follows."""

    add: AddRequest
    """With a source that names no blocks yet."""


class DropHeld(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """What was held is not wanted, whether it runs by now or not."""

    request_id: str


class SetSource(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The answer to NeedsSource."""

    request_id: str
    choice: int
    source: KVSource | None = None
    """None: nothing is to be had, compute it."""
    kind: str = ""
    """Where the source is: tier or offer."""


class Abort(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    request_id: str
    choice: int = -1
    """-1: all choices."""


class ReleaseOffer(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    offer_id: str


class OtherWay(msgspec.Struct, frozen=True, kw_only=True):
    """Another connector that may reach the same pool."""

    connector: str
    metadata: bytes


class Use(StrEnum):
    """What a peer is connected for; one that is for both is connected and let go for each by itself."""

    PULL = "pull"
    PUSH = "push"


class ConnectPeer(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Prepare to pull from a pool, or to write into it; answered by PeerConnected."""

    peer_id: str
    connector: str
    metadata: bytes
    num_blocks: int
    block_bytes: int
    layouts: list[Layout] = []
    """Of its blocks, where they are not those of the pool here."""
    others: list[OtherWay] = []
    """What a pull may go on over when this connector fails it, in order."""
    use: Use = Use.PULL
    number: int = 0
    """The answer has the same: an earlier order for the same peer and connector may be answered yet."""


class DisconnectPeer(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    peer_id: str
    use: Use = Use.PULL
    connector: str = ""
    """The only one to let go: an order for it is given up, and the others stay; all of them when empty."""


class ResetPrefixCache(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Forget the names of all blocks; answered by PrefixCacheReset."""

    number: int
    damaged: list[GroupBlocks] = []
    """Blocks that hold other bytes than were computed: who reads them must not go on."""


class Ping(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Say that you live; answered by Pong at once, also while a step runs."""

    number: int


class PullOwnBlock(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Pull a block of the own pool over whatever connector `peer_id` is connected by; answered by OwnBlockPulled."""

    number: int
    peer_id: str
    """The core's own, connected before by ConnectPeer as any other peer."""
    deadline_s: float


class Shutdown(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    pass


ToCore = (
    AddRequest
    | HoldRequest
    | DropHeld
    | Abort
    | ReleaseOffer
    | ConnectPeer
    | DisconnectPeer
    | BeginPush
    | StopPush
    | ExpectPush
    | PushArrived
    | EndPush
    | ShutOutWriters
    | ResetPrefixCache
    | SetSource
    | Ping
    | PullOwnBlock
    | Shutdown
)


# ---- core -> server ------------------------------------------------------------------------------


class CoreReady(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The model is loaded, the pool exists, steps may run."""

    model_fingerprint: str
    layout_fingerprints: list[str]
    block_size: int
    num_blocks: int
    block_bytes: int
    max_model_len: int
    vocab_size: int
    eos_token_ids: list[int]
    connectors: dict[str, bytes]
    """Connector name -> metadata that consumers of this pool need."""
    weights_fingerprint: str = ""
    """Of the model, whatever the dtype."""
    layouts: list[Layout] = []
    """What the layout fingerprints name, where other engines may convert it; else empty."""
    staging_bytes: int = 0
    """Most bytes of a peer's blocks that are converted at a time; 0: those of other layouts are refused."""
    push_connectors: list[str] = []
    """Those that can also write, in order of preference."""
    dtype: str
    kv_dtype: str = ""
    """Of keys and values in the pool: the model's, or int8."""
    quantization: str = "none"
    """As configured: what was done with the checkpoint's weights."""
    backend: str
    row_invariant: bool
    instruction_set: str = ""
    """That the CPU library uses; empty with PyTorch."""
    backend_fallback: str = ""
    """Why PyTorch computes where the CPU library was wanted."""
    expanded_weights: dict[str, int] = {}
    """How many matrices that the checkpoint has in fewer bits are kept in 16, by reason."""
    keeps_history: bool = True
    """Whether all KV groups keep every token, as the tier's blocks must."""
    max_num_seqs: int = 0
    """As resolved, when the configuration left it to the device; so is the next."""
    max_num_batched_tokens: int = 0

    @property
    def description(self) -> KVDescription | None:
        """What is told to those whose fingerprints may differ."""
        if not self.layouts:
            return None
        return KVDescription(
            weights_fingerprint=self.weights_fingerprint,
            layouts=tuple(self.layouts),
            block_bytes=self.block_bytes,
            staging_bytes=self.staging_bytes,
        )


class CoreProgress(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Start-up progress for people: stage name and fraction done, 0…1."""

    stage: str
    fraction: float


class CoreFailed(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The core cannot start or cannot go on. `config` errors are not worth a restart."""

    code: str
    message: str


class OfferSealed(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The prompt's KV is complete and held for the offer."""

    offer_id: str
    request_id: str
    groups: list[GroupBlocks]
    num_tokens: int
    marks: KVMarks = NO_MARKS
    grows: bool = False
    """The request goes on and writes behind these tokens, in the last block too."""
    num_reused: int = 0
    """Leading tokens whose KV was found here or pulled."""
    checksums: list[list[int]] = []
    """Of each group's blocks, where the core has summed them."""
    digest: bytes = b""
    """Of the prompt, as the server has told it."""


class TransferEnded(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """A pull ended in the core; the server tells the owner. `reason` is empty when committed."""

    transfer_id: str
    peer_id: str
    request_id: str
    committed: bool
    reason: str = ""
    num_bytes: int = 0
    duration_s: float = 0.0
    way: str = ""
    """The connector that it ended over, and after which other; empty: none was used."""
    damaged: list[str] = []
    """Connectors over which its bytes came otherwise than their owner had summed them."""


class BlocksComputed(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Full prompt blocks computed here, for the tier to pull; not pinned, the generations tell whether they still are."""

    request_id: str
    keys: list[bytes]
    blocks: GroupBlocks
    reused: list[GroupBlocks] = []
    """What they were computed behind and was here before them: as good as these are they are."""


class NeedsSource(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """A preempted choice's turn has come and its KV is not here; it waits until SetSource, others go on."""

    request_id: str
    choice: int
    num_cached: int
    """Leading tokens that are here."""
    keys: list[bytes] = []
    """The tier's names of the full blocks of its prompt and output; empty where the tier has nothing for it."""
    after: str = ""
    """The kind of source that was tried last and failed."""


class PeerConnected(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    peer_id: str
    connector: str
    error: str = ""
    use: Use = Use.PULL
    number: int = 0
    """The order's."""


class ConnectorChanged(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """A connector's metadata is another now than in CoreReady; peers that connect from here on need this one."""

    connector: str
    metadata: bytes


class OfferPublished(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """A connector that copies offers has made one available, or could not."""

    connector: str
    offer_id: str
    error: str = ""
    num_remade: int = 0
    """Times since the last one that what the connector keeps copies in was gone, and was made anew."""


class PrefixCacheReset(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """No block that was computed before this can be found any more."""

    number: int


class Pong(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The core lives."""

    number: int


class OwnBlockPulled(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """How a PullOwnBlock went. `error` is empty when every byte arrived."""

    number: int
    error: str = ""


class StepOutput(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """All that one step produced."""

    deltas: list[ChoiceDelta] = []
    sealed: list[OfferSealed] = []
    transfers: list[TransferEnded] = []
    computed: list[BlocksComputed] = []
    needs: list[NeedsSource] = []
    pushes: list[PushReport] = []
    landings: list[LandingReport] = []
    stats: Stats | None = None
    begun_s: float = 0.0
    ended_s: float = 0.0
    """When its computing began and ended, on the clock that all processes of a machine share; 0 when there was no step."""
    kv_events: bytes = b""
    """What `KVEventLog.take` gave: an encoded batch to publish; empty when there is none."""


FromCore = (
    CoreReady
    | CoreProgress
    | CoreFailed
    | StepOutput
    | PeerConnected
    | ConnectorChanged
    | OfferPublished
    | PushExpected
    | WritersShutOut
    | PrefixCacheReset
    | Pong
    | OwnBlockPulled
)

encode = msgspec.msgpack.Encoder().encode
to_core_decoder: msgspec.msgpack.Decoder[ToCore] = msgspec.msgpack.Decoder(ToCore)
from_core_decoder: msgspec.msgpack.Decoder[FromCore] = msgspec.msgpack.Decoder(FromCore)
