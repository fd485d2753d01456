"""What the core knows of a request: the request itself, and one `Sequence` per choice that has started.

A sequence has tokens computed and tokens to compute; scheduling is nothing but raising the first to the second.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import numpy as np

from pdmesh.engine.block_hash import ExtraKeys
from pdmesh.engine.messages import AddRequest
from pdmesh.engine.states import FINISH_REASON, Event, IllegalEvent, State, after
from pdmesh.engine.token_buffer import TokenBuffer
from pdmesh.protocol.messages import KVSource, SamplingParams, TokenLogprobs

NO_ROW = -1
Order = tuple[float, int, int]
"""Who comes first: smaller ones."""


class Request:
    """A request and its choices.

    They start one after the other: the one that started last leads, and when it has the prompt's KV the next takes that
    over and leads. Of a choice that has not started only its number is kept.
    """

    def __init__(self, add: AddRequest, number: int, num_groups: int, *, rank: float = 0.0) -> None:
        request = add.request
        self.request_id = request.request_id
        self.number = number
        """Order of arrival."""
        self.rank = rank
        """What goes before the order of arrival: 0 for all when first come is first served."""
        self.sampling: SamplingParams = request.sampling
        self.cache_salt = request.cache_salt
        self.extra_keys = ExtraKeys(cache_salt=request.cache_salt)
        self.prompt = np.array(request.token_ids, dtype=np.int64)
        """Shared by all choices, so not writable."""
        self.prompt.setflags(write=False)
        self.num_prompt = len(request.token_ids)
        self.prefill_only = request.prefill_only
        self.offer_id = add.offer_id
        """Offer still to be sealed; empty when there is none or it is sealed or released."""
        self.digest = add.digest
        self.source: KVSource | None = add.source
        """KV still to be pulled; None once its transfer has begun or ended."""
        self.recompute_last = add.recompute_last
        self.store_to_tier = add.store_to_tier
        self.may_refetch = add.may_refetch
        is_single = len(request.choices) == 1 and request.prefill_only
        self.num_offered = self.num_prompt + (len(request.emitted[0]) if is_single and request.emitted else 0)
        """Leading tokens that an offer is of: choices share only the prompt."""
        self.push_id = add.push_id
        """Push that may have brought some of the prompt; empty when there is none, or it has been made use of."""
        self.num_choices = len(request.choices)
        self.doubted_from: int | None = None
        """Place from which tokens are drawn again, if any are: who drew them has damaged KV."""
        self.is_prompt_computed = False
        self.is_lookup_counted = False
        """Whether the statistics know what it found in the prefix cache."""
        self._emitted = request.emitted
        self._num_groups = num_groups
        self.held = {choice: place for place, choice in enumerate(request.choices)}
        """Choices that have not started, with their places in line, in order."""
        self.sequences: dict[int, Sequence] = {}
        """Live choices that have started."""
        self.lead = self.make_next()
        self.lead.state = State.WAITING
        self.wants_prompt_logprobs = (
            self.sampling.prompt_logprobs is not None and self.lead.choice == 0 and self.lead.num_emitted == 0
        )
        self.tier_keys = list(add.block_keys)
        """Keys of the prompt's full blocks for other processes; the server sends them when it has them."""
        self.arrived_s = time.monotonic()
        self.started_s: float | None = None
        """When its first step was scheduled."""

    @property
    def is_ended(self) -> bool:
        return not self.sequences and not self.held

    def make_next(self, choice: int | None = None) -> Sequence:
        """Take a choice, the first in line or a given one, out of the held and make its sequence."""
        choice = next(iter(self.held)) if choice is None else choice
        place = self.held.pop(choice)
        emitted = self._emitted[place] if self._emitted else []
        tokens = TokenBuffer(self.prompt, emitted)
        sequence = self.sequences[choice] = Sequence(self, choice, place, tokens, len(emitted), self._num_groups)
        if self.doubted_from is not None:
            sequence.doubt(self.doubted_from)
        return sequence

    @property
    def queued_s(self) -> float:
        """Seconds it waited, for blocks, budget or KV of others; 0 while it has not started."""
        return 0.0 if self.started_s is None else self.started_s - self.arrived_s


@dataclass(slots=True)
class Comeback:
    """How a sequence that was preempted gets its KV back."""

    source: KVSource | None = None
    """Still to be pulled."""
    kind: str = ""
    """Where that is, or was when it failed."""
    is_settled: bool = False
    """Nobody is asked for a source any more."""
    fetched: str = ""
    """Where its KV was fetched from."""


class BrokenSequence(Exception):
    """A sequence met an event that cannot happen to it: a bug of the engine, which ends its request."""

    def __init__(self, sequence: Sequence, message: str) -> None:
        super().__init__(message)
        self.sequence = sequence


class Sequence:
    """One choice of a request: its tokens, the blocks that hold their KV, and where it stands."""

    # A step visits each running sequence: slots are read faster.
    __slots__ = (
        "blocks",
        "capacity",
        "choice",
        "comeback",
        "doubted",
        "end",
        "has_reported",
        "is_holding",
        "is_new",
        "keys",
        "kv_bytes",
        "kv_source",
        "lost_blocks",
        "may_register",
        "news",
        "num_computed",
        "num_emitted",
        "num_in_flight",
        "num_planned",
        "num_registered",
        "num_reused_tokens",
        "num_told_blocks",
        "num_wanted",
        "order",
        "prompt_logprobs",
        "recompute_end",
        "request",
        "row",
        "state",
        "tokens",
        "unsent_logprobs",
        "unsent_token_ids",
    )

    def __init__(
        self, request: Request, choice: int, place: int, tokens: TokenBuffer, num_emitted: int, num_groups: int
    ) -> None:
        self.request = request
        self.choice = choice
        self.order: Order = (request.rank, request.number, place)
        self.tokens = tokens
        self.num_emitted = num_emitted
        """Output tokens that another engine produced."""
        self.doubted: list[int] = []
        """Tokens that are out and drawn again, next first."""
        self.num_computed = 0
        """Tokens whose KV is in the blocks."""
        self.num_planned = 0
        """Tokens whose KV is there, or will be when the steps under way have ended."""
        self.num_wanted = len(tokens)
        """Tokens, those included that the steps under way will append."""
        self.num_in_flight = 0
        """Steps under way that compute some of it."""
        self.end = 0
        """Tokens at which it ends at the latest; set at its admission."""
        self.state = State.HELD
        self.is_new = False
        """Whether it waits and has not had a turn yet."""
        self.is_holding = False
        """Whether it waits and came with blocks."""
        self.row = NO_ROW
        """Its place in the worker's tables while it runs."""
        self.blocks: list[list[int]] = [[] for _ in range(num_groups)]
        """Block table of each group, all of one length; NO_BLOCK where the group needs none."""
        self.capacity = 0
        """Tokens that the tables cover."""
        self.keys: list[bytes] = []
        """Names of the leading full blocks, as far as they were needed."""
        self.num_registered = 0
        """Leading blocks that the prefix cache has been told of."""
        self.may_register = True
        self.num_reused_tokens = 0
        """Leading tokens whose KV was not computed here: found, or pulled."""
        self.num_told_blocks = 0
        """Leading blocks whose content the tier has been told of."""
        self.kv_source = ""
        self.kv_bytes = 0
        self.comeback: Comeback | None = None
        """Set while it waits for its turn after a preemption."""
        self.recompute_end = 0
        """Tokens that it had when it began to compute again what a preemption took."""
        self.lost_blocks: dict[int, int] = {}
        """Blocks that preemptions have taken after tokens were out, and their generations: those tokens rest on them."""
        self.news = ""
        """`kv_source` of its next delta, when something happened to it."""
        self.has_reported = False
        """Whether its first delta is out."""
        self.unsent_token_ids: list[int] = []
        self.unsent_logprobs: list[TokenLogprobs] = []
        self.prompt_logprobs: list[TokenLogprobs | None] = [None]
        """Grows by one per prompt position, when asked for."""

    @property
    def num_tokens(self) -> int:
        return len(self.tokens)

    @property
    def num_to_compute(self) -> int:
        """Tokens that no step has been given yet."""
        return self.num_wanted - self.num_planned

    @property
    def num_output(self) -> int:
        """Generated tokens, here and before."""
        return len(self.tokens) - self.request.num_prompt

    @property
    def holds_blocks(self) -> bool:
        return self.capacity > 0

    @property
    def is_finished(self) -> bool:
        return self.state in FINISH_REASON

    @property
    def wants_prompt_logprobs(self) -> bool:
        return self.request.wants_prompt_logprobs and self.choice == 0

    def doubt(self, first: int) -> None:
        """Take the tokens from place `first` on back, to be drawn again and compared; called while nothing is computed."""
        first = max(first, self.request.num_prompt)
        self.doubted = [*self.tokens.view(first, self.num_tokens).tolist(), *self.doubted]
        self.tokens.truncate(first)
        self.num_wanted = self.num_tokens
        # Those that were there may name blocks of what is taken back.
        self.keys = []

    def apply(self, event: Event) -> None:
        """Move to the state that follows `event`. Raises BrokenSequence, with the sequence, when there is none."""
        try:
            self.state = after(self.state, event)
        except IllegalEvent as exc:
            raise BrokenSequence(self, str(exc)) from exc

    def __repr__(self) -> str:
        return f"<{self.request.request_id}/{self.choice} {self.state.name} {self.num_computed}/{self.num_tokens}>"
