"""What a request and its answer are, once the text has become token ids; shared by proxy, engines and tests.

These structs cross the ZMQ boundary inside an engine as msgpack; `wire.py` maps them to protobuf between services.
"""

import msgspec

from pdmesh.protocol.layout import Layout

# As wide as `mesh.proto` has them.
MAX_GROUPS = MAX_BLOCK_IDS = 1 << 32
MAX_GENERATIONS = 1 << 64
MAX_CHECKSUMS = 1 << 64


ExtraArg = bool | int | float | str | list[int | float | str]
ExtraArgs = dict[str, ExtraArg]


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True):
    """How tokens are chosen; already validated and resolved (no field is "use the default" any more)."""

    n: int = 1
    """Choices, 1…16384."""
    temperature: float = 1.0
    """0 is greedy."""
    top_p: float = 1.0
    top_k: int = 0
    """0 is off."""
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    seed: int = 0
    """Always set: the proxy draws one for a request that has none. int64."""
    max_tokens: int = 16
    """Upper bound of generated tokens per choice, ≥ 1 (0 only with prompt_logprobs: nothing is generated)."""
    min_tokens: int = 0
    ignore_eos: bool = False
    stop_token_ids: list[int] = []
    """Further ids that end a choice; the model's own EOS ids are added by the engine unless ignore_eos."""
    logprobs: int | None = None
    """Top alternatives to report for each generated token; None is off, 0 is the chosen token only."""
    prompt_logprobs: int | None = None
    logit_bias: dict[int, float] = {}
    allowed_token_ids: list[int] | None = None
    bad_words_token_ids: list[list[int]] = []
    repetition_detection: "RepetitionDetection | None" = None
    thinking: "ThinkingBudget | None" = None
    extra_args: ExtraArgs = {}
    """`vllm_xargs`: for custom logits processors."""


class RepetitionDetection(msgspec.Struct, frozen=True, kw_only=True):
    """End a choice (finish reason "repetition") whose output ends in `min_count` repeats of one pattern."""

    max_pattern_size: int
    """Tokens; 0 is off."""
    min_pattern_size: int = 0
    """0 stands for 1."""
    min_count: int = 2


class ThinkingBudget(msgspec.Struct, frozen=True, kw_only=True):
    """Force the end of a thinking section that has reached its budget."""

    budget: int
    """Most tokens between start and end."""
    start_token_ids: list[int]
    end_token_ids: list[int]
    """What is forced, token by token, and what ends a section by itself."""


class TokenLogprobs(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """Log-probabilities at one position: the chosen token first, then the top alternatives, best first."""

    token_ids: list[int]
    logprobs: list[float]
    rank: int
    """Rank of the chosen token in the vocabulary, from 1."""


class GroupBlocks(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """Blocks of one KV group in a pool, with the generation word each had when the list was made."""

    group: int
    block_ids: list[int]
    generations: list[int]
    first_block: int = 0
    """Index, in the request, of the first block listed: a sliding group lists only what its window needs."""
    checksums: list[int] = []
    """Sum of each block's bytes, as its owner has them; 0, or an empty list: not known, and so not checked."""

    @property
    def is_sound(self) -> bool:
        """Whether each block has a generation and all fit the wire; which blocks a pool has, only its owner knows."""
        return (
            0 <= self.group < MAX_GROUPS
            and 0 <= self.first_block < MAX_BLOCK_IDS
            and len(self.block_ids) == len(self.generations)
            and all(0 <= block_id < MAX_BLOCK_IDS for block_id in self.block_ids)
            and all(0 <= generation < MAX_GENERATIONS for generation in self.generations)
            and len(self.checksums) in (0, len(self.block_ids))
            and all(0 <= checksum < MAX_CHECKSUMS for checksum in self.checksums)
        )


class KVMarks(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What is to be kept in mind of KV wherever it goes; by default nothing."""

    num_exact_tokens: int | None = None
    """Behind so many first tokens it rests on KV that was rounded on its way between engines: near what would be computed, and
    not the same. None: none of it does."""
    before_reset: bool = False
    """It was there before its owner's prefix cache was emptied: for the request that it was computed for, and no other."""


NO_MARKS = KVMarks()


class KVSource(msgspec.Struct, frozen=True, kw_only=True):
    """KV that a consumer may pull instead of computing it: where it lies and how far it reaches."""

    transfer_id: str
    """Minted by the consumer, one per attempt."""
    peer_id: str
    """`engine_id@epoch` of the pool's owner, already connected in the worker half."""
    groups: list[GroupBlocks]
    num_tokens: int
    """Tokens from position 0 that the blocks hold."""
    layouts: list[Layout] = []
    """Of the blocks, one per group, where they are not those of the consumer's pool."""
    marks: KVMarks = NO_MARKS
    num_resets: int | None = None
    """Resets of the consumer's prefix cache that had been ordered when the transfer began; None: they are not for this KV."""
    fail_policy: str = "recompute"
    """`recompute` or `fail`: what to do when the pull fails."""
    offer_id: str = ""
    """The offer that holds the blocks; empty: none does."""
    connector: str = ""
    """Over which to pull; empty: the one that its owner was connected over last."""
    deadline_s: float = 30.0


class AwaitedOffer(msgspec.Struct, frozen=True, kw_only=True):
    """An offer that its owner is still computing."""

    offer_id: str
    """As minted by the proxy for the prefill leg."""
    owner_id: str
    """`engine_id@epoch` of who computes it."""
    owner_address: str
    """gRPC `host:port`."""


class GenerateRequest(msgspec.Struct, frozen=True, kw_only=True):
    """One request to an engine. Token ids in, deltas out; text never reaches an engine's core."""

    request_id: str
    token_ids: list[int]
    """The prompt."""
    sampling: SamplingParams
    choices: list[int] = msgspec.field(default_factory=lambda: [0])
    """Choice indices to produce here (all of them, or those to resume)."""
    emitted: list[list[int]] = []
    """Tokens already emitted, one list per entry of `choices`; empty means none for any. Generation continues after
    them: they count for max_tokens, penalties and positions, and are not emitted again."""
    prefill_only: bool = False
    """End every choice after its first token and offer the prompt's KV."""
    ticket: bytes = b""
    """A prefill's ticket: fetch the prompt's KV instead of computing it."""
    awaits: AwaitedOffer | None = None
    """Instead of a ticket: ask the owner itself, wait until it has the first token, and go on from there."""
    cache_salt: str = ""
    priority: int = 0
    deadline_s: float = 600.0
    """Seconds left for the whole request when it was sent."""
    hand_back: bool = False
    """Who sent it has another prefill compute its KV, when it was preempted and the KV is to be had nowhere: end it with the
    error Preempted."""
    offer_id: str = ""
    """With prefill_only: what the proxy calls the offer, so that others may be told of it before it is sealed; else empty."""

    @property
    def is_handed_over(self) -> bool:
        """Whether a prefill computes its prompt, or has."""
        return bool(self.ticket or self.awaits)


class ChoiceDelta(msgspec.Struct, frozen=True, kw_only=True):
    """What one engine step produced for one choice. The last one of a choice carries `finish_reason`, or, on a
    prefill-only leg, the last one of the request carries `ticket`."""

    request_id: str
    choice: int = 0
    token_ids: list[int] = []
    logprobs: list[TokenLogprobs] = []
    """One per token when asked for."""
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    """Once, on the first delta of choice 0: one per prompt token, the first None."""
    finish_reason: str = ""
    """"" while it goes on; else stop, length, repetition, abort or error."""
    stop_token_id: int | None = None
    """The token that ended it when that was a stop_token_ids entry (None for EOS)."""
    ticket: bytes = b""
    cached_tokens: int = 0
    """Prompt tokens that were not computed here (local prefix, tier, or fetched), set on the first delta."""
    kv_bytes: int = 0
    """Bytes pulled for this request, set on the first delta."""
    kv_source: str = ""
    """Where they came from: "", "prefix", "tier", or the connector's name; "recompute:<reason>" after a failed pull."""
    queued_s: float = 0.0
    """Seconds between the core's first sight of the request and its first step, set on the first delta."""
    kv_committed: bool = False
    """True once on a leg with a ticket: this engine no longer needs the offer (fetched, or gave up on it)."""
    error_code: str = ""
    error_message: str = ""
    error_param: str = ""
