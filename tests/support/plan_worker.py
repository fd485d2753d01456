"""A worker without a model: it executes plans as the real one must be able to, and knows of each block what it holds.

A block's content is, per token, a hash of all that its KV depends on: the group, the salt, the tokens up to it, and the era,
which a reset of the prefix cache ends. So a plan that lets a row read KV that is not there, not the row's own, not written yet
or older than a reset is found at once.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

from pdmesh.engine.kv_groups import KVGroup
from pdmesh.engine.plan import NO_BLOCK, NO_TOKEN, NewRow, RowFailure, StepPlan, StepResult
from pdmesh.protocol.messages import TokenLogprobs

GARBAGE = -1
EOS = 1
FIRST_TOKEN, NUM_TOKENS = 2, 90


@dataclass(frozen=True, kw_only=True)
class Script:
    """What the model will say to one request."""

    number: int
    prompt: list[int]
    salt: str = ""
    max_tokens: int = 4
    eos_at: int = -1
    """Output index of the token that is EOS; -1: none."""
    nan_at: int = -1
    """Output index at which the logits are NaN; -1: never."""
    era: int = 0
    """Resets of the prefix cache before it arrived."""

    def token(self, choice: int, tokens: list[int]) -> int:
        """Return the token that follows `tokens`, the prompt included."""
        index = len(tokens) - len(self.prompt)
        if index == self.eos_at:
            return EOS
        return FIRST_TOKEN + hash((choice, tokens[-1], len(tokens))) % NUM_TOKENS


def chain(salt: str, group: int, era: int, tokens: list[int], start: list[int] | None = None) -> list[int]:
    """Return what the KV of each token depends on, in one number; `start` is extended in place."""
    values = [] if start is None else start
    value = values[-1] if values else hash((salt, group, era))
    for token in tokens[len(values) :]:
        value = hash((value, token))
        values.append(value)
    return values


def prompt_logprobs_at(prompt: list[int], position: int) -> TokenLogprobs:
    """Return what the worker says of a prompt token."""
    return TokenLogprobs(token_ids=[prompt[position]], logprobs=[-float(position)], rank=position)


@dataclass
class Row:
    script: Script
    new: NewRow
    tokens: list[int]
    tables: list[list[int]]
    era: int = -1
    """That of the KV it began with; -1: it has not begun."""
    chains: list[list[int]] = field(default_factory=list)
    has_failed: bool = False
    """It got NaN: what is planned for it from here on was planned in vain."""
    has_crashed: bool = False
    """It was in a step that crashed, or rests on one."""


class PlanWorker:
    """Rows and blocks. `run` asserts that a plan can be executed, executes it and returns its result."""

    def __init__(
        self, groups: list[KVGroup], num_blocks: int, num_rows: int, script_of: Callable[[int], Script]
    ) -> None:
        self.groups = groups
        self.block_size = groups[0].block_size
        self.num_rows = num_rows
        self.content = [[GARBAGE] * self.block_size for _ in range(num_blocks)]
        self.rows: dict[int, Row] = {}
        self.era = 0
        self._script_of = script_of

    def run(self, plan: StepPlan, *, is_crashing: bool = False, is_after_crash: bool = False) -> StepResult:
        """Execute a plan. One that crashes has taken its rows over and written garbage wherever it was to write; one planned
        before that was known may rest on it."""
        self._apply(plan, is_crashing=is_crashing)
        assert len(plan.rows) == len(plan.starts) == len(plan.counts) == len(plan.samples)
        assert len(set(plan.rows)) == len(plan.rows), "a row is planned twice"
        self._check_tables(plan)
        result = StepResult(token_ids=[])
        for index, (row_id, start, count) in enumerate(zip(plan.rows, plan.starts, plan.counts, strict=True)):
            row = self.rows[row_id]
            is_lost = row.has_crashed and not is_after_crash
            assert not is_lost, f"request {row.script.number}/{row.new.choice} goes on after a step that crashed"
            if is_crashing or row.has_failed or row.has_crashed:
                row.has_crashed |= is_crashing
                result.token_ids.append(NO_TOKEN)
                self._write(row, start, count, is_garbage=True)
                continue
            assert start + count <= len(row.tokens), f"{start} + {count} tokens planned, {len(row.tokens)} are known"
            if row.era < 0:
                self._begin(row, start)
            if missing := self._missing(row, start):
                # What rests on a step that crashed must not go on once that is known.
                assert is_after_crash, f"request {row.script.number}/{row.new.choice} lacks KV at {start}: {missing}"
                row.has_crashed = True
                result.token_ids.append(NO_TOKEN)
                self._write(row, start, count, is_garbage=True)
                continue
            self._write(row, start, count)
            self._sample(row, index, plan, result)
        return result

    def _apply(self, plan: StepPlan, *, is_crashing: bool) -> None:
        for row_id in plan.freed:
            assert self.rows.pop(row_id, None) is not None, f"row {row_id} is freed, but not in use"
        for new in plan.new:
            assert 0 <= new.row < self.num_rows
            assert new.row not in self.rows, f"row {new.row} is in use"
            script = self._script_of(new.sampling.seed)
            tokens = _ids(new.token_ids)
            assert tokens[: new.num_prompt] == script.prompt
            self.rows[new.row] = Row(script, new, tokens, [list(table) for table in new.blocks])
        for update in plan.updates:
            table = self.rows[update.row].tables[update.group]
            assert update.first <= len(table), "a table has a hole"
            table[update.first : update.first + len(update.block_ids)] = update.block_ids
        for source, target in plan.copies:
            self.content[target] = [GARBAGE] * self.block_size if is_crashing else list(self.content[source])

    def _check_tables(self, plan: StepPlan) -> None:
        """Blocks are there for all that is read and written, belong to one group, and are written by one row that nobody
        else reads."""
        size = self.block_size
        groups: dict[int, int] = {}
        readers: dict[int, int] = {}
        written: list[int] = []
        for row_id, start, count in zip(plan.rows, plan.starts, plan.counts, strict=True):
            assert count > 0
            row = self.rows[row_id]
            for index, (group, table) in enumerate(zip(self.groups, row.tables, strict=True)):
                used = table[group.first_needed(start) : -(-(start + count) // size)]
                assert len(used) == -(-(start + count) // size) - group.first_needed(start), "a table is too short"
                assert all(0 <= block < len(self.content) for block in used), f"a table lacks a block: {table}"
                for block in used:
                    assert groups.setdefault(block, index) == index, f"block {block} is in two groups"
                    readers[block] = readers.get(block, 0) + 1
                written += table[start // size : -(-(start + count) // size)]
        assert all(readers[block] == 1 for block in written), "a block that is written is shared"

    def _begin(self, row: Row, start: int) -> None:
        """Take up the era of the KV that a row begins with, which must not be older than its request."""
        for era in range(self.era, row.script.era - 1, -1):
            row.era = era
            row.chains = [chain(row.script.salt, group, era, row.tokens) for group in range(len(self.groups))]
            if not self._missing(row, start):
                return

    def _missing(self, row: Row, start: int) -> str:
        """Name what a query at `start` would read and is not there."""
        for group, values in enumerate(row.chains):
            chain(row.script.salt, group, row.era, row.tokens, values)
        size = self.block_size
        for index, (group, table, values) in enumerate(zip(self.groups, row.tables, row.chains, strict=True)):
            first = max(start - group.window + 1, 0) if group.window else 0
            for place in range(first // size, -(-start // size)):
                low, high = max(place * size, first), min((place + 1) * size, start)
                if self.content[table[place]][low - place * size : high - place * size] != values[low:high]:
                    return f"tokens {low}…{high - 1} of group {index} in block {table[place]}"
        return ""

    def _write(self, row: Row, start: int, count: int, *, is_garbage: bool = False) -> None:
        size = self.block_size
        for group, table in enumerate(row.tables):
            for position in range(start, start + count):
                value = GARBAGE if is_garbage else row.chains[group][position]
                self.content[table[position // size]][position % size] = value

    def _sample(self, row: Row, index: int, plan: StepPlan, result: StepResult) -> None:
        end, num_prompt = plan.starts[index] + plan.counts[index], row.new.num_prompt
        if row.new.wants_prompt_logprobs:
            positions = range(plan.starts[index] + 1, min(end, num_prompt - 1) + 1)
            if positions:
                result.prompt_logprobs[index] = [prompt_logprobs_at(row.tokens, position) for position in positions]
        has_sample = end == len(row.tokens) and row.script.max_tokens > 0
        assert plan.samples[index] == has_sample, f"{end} of {len(row.tokens)} tokens, sample {plan.samples[index]}"
        result.token_ids.append(NO_TOKEN)
        if not has_sample:
            return
        output = len(row.tokens) - num_prompt
        assert output < row.script.max_tokens, "planned beyond max_tokens"
        if output == row.script.nan_at:
            row.has_failed = True
            result.failures[index] = RowFailure(code="EngineFault", message="NaN", is_nan=True)
            return
        token = result.token_ids[index] = row.script.token(row.new.choice, row.tokens)
        row.tokens.append(token)
        if row.new.sampling.logprobs is not None:
            result.logprobs[index] = TokenLogprobs(token_ids=[token], logprobs=[-1.0], rank=1)


def _ids(data: bytes) -> list[int]:
    return list(memoryview(data).cast("I")) if data else []


def table_blocks(tables: list[list[int]]) -> list[int]:
    """Return the blocks that tables hold."""
    return [block for table in tables for block in table if block != NO_BLOCK]
