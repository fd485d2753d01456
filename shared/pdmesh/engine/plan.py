"""What crosses from the scheduler to the worker that owns the rows, and back: deltas only, so that it may be another process.

A row is a place in the worker's tables (tokens, block tables, sampling state) that a running sequence keeps until it ends or
is preempted. A plan says what changed since the plan before it; plans are executed in order, one at a time. All of it is
msgpack: a step over N rows costs O(N) bytes, whatever lies behind them, but for rows that are new.
"""

import msgspec

from pdmesh.protocol.messages import SamplingParams, TokenLogprobs

NO_TOKEN = -1
NO_BLOCK = -1
"""Entry of a block table at a place that its group's rule does not need any more."""


class NewRow(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """A sequence that takes a row, with all that the worker must know of it."""

    row: int
    choice: int
    token_ids: bytes
    """Prompt and output so far: little-endian uint32."""
    num_prompt: int
    sampling: SamplingParams
    wants_prompt_logprobs: bool
    blocks: list[list[int]]
    """Its block table in each group; NO_BLOCK where there is none."""


class BlockUpdate(msgspec.Struct, frozen=True, array_like=True):
    """A row's table in one group, from entry `first` on."""

    row: int
    group: int
    first: int
    block_ids: list[int]


class StepPlan(msgspec.Struct, kw_only=True, array_like=True):
    """One step: N rows, in order. `freed`, `new`, `updates` and `copies` apply before it, in this order."""

    freed: list[int] = []
    """Rows whose state may be dropped; they may come back in `new` of this very plan."""
    new: list[NewRow] = []
    updates: list[BlockUpdate] = []
    copies: list[tuple[int, int]] = []
    """Blocks to copy whole: (source, target)."""
    rows: list[int] = []
    """[N]"""
    starts: list[int] = []
    """[N] tokens whose KV is there before the step."""
    counts: list[int] = []
    """[N] tokens to compute, from `starts` on. Their ids are in the row: told by `new`, or sampled by an earlier plan."""
    samples: list[bool] = []
    """[N] whether the row's last computed token is its last, so that the next one is sampled and put into the row."""


class RowFailure(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """Ends one choice, and nothing else."""

    code: str
    """Class name in `pdmesh.errors`."""
    message: str
    is_nan: bool = False


class StepResult(msgspec.Struct, kw_only=True, array_like=True):
    """What a plan produced. The dictionaries have entries, by index into the plan's rows, only where there is something."""

    token_ids: list[int]
    """[N] the sampled token, -1 where there is none."""
    logprobs: dict[int, TokenLogprobs] = {}
    prompt_logprobs: dict[int, list[TokenLogprobs]] = {}
    """For the prompt positions behind each of the row's tokens."""
    failures: dict[int, RowFailure] = {}
