"""What is always true of an engine's state: every block and every sequence is in exactly one place."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import TYPE_CHECKING

from pdmesh.connector.ledger import BlockLists
from pdmesh.engine.plan import NO_BLOCK
from pdmesh.engine.states import State

if TYPE_CHECKING:
    from pdmesh.engine.engine_state import EngineState


def check_state(state: EngineState, free_rows: list[int]) -> None:
    """Assert it. `free_rows` are those that no sequence has."""
    state.kv.check_integrity(_holders(state))
    requests = state.requests.values()
    assert all(sequence.state is State.RUNNING for sequence in state.running)
    rows = [sequence.row for sequence in state.running]
    assert sorted([*rows, *free_rows]) == list(range(state.limits.max_num_seqs)), "a row is lost or double"
    assert all(sequence.state in (State.WAITING, State.PREEMPTED) for sequence in state.waiting)
    assert all(sequence.state is State.WAITING_FOR_SOURCE for sequence in state.asking.values())
    assert state.waiting.num_tokens == sum(sequence.num_to_compute for sequence in state.waiting)
    elsewhere = state.ledger.num_owners + len(state.compiling) + len(state.asking)
    placed = len(state.running) + len(state.waiting) + elsewhere
    live = sum(len(request.sequences) for request in requests)
    assert placed == live, f"{live} live sequences in {placed} places"
    assert state.num_held == sum(len(request.held) for request in requests)
    for request in requests:
        assert not request.held or request.lead.choice in request.sequences, "nobody will free the held choices"
    uncomputed = sum(request.num_prompt for request in requests if not request.is_prompt_computed)
    assert state.num_uncomputed_tokens == uncomputed
    _check_sharing(state)


def _check_sharing(state: EngineState) -> None:
    """Assert that a block is shared only by sequences that will not write to it."""
    sequences = [sequence for request in state.requests.values() for sequence in request.sequences.values()]
    num_holders = Counter(block for each in sequences for table in each.blocks for block in table)
    for sequence in sequences:
        # What a pull writes to is not told by the sequence's numbers.
        if sequence.state is not State.WAITING_FOR_REMOTE_KVS:
            first = sequence.num_computed // state.kv.block_size
            own = [block for table in sequence.blocks for block in table[first:] if block != NO_BLOCK]
            assert all(num_holders[block] == 1 for block in own), f"{sequence} would write to shared blocks"


def _holders(state: EngineState) -> Iterator[BlockLists]:
    yield from state.ledger.holders()
    for borrowed in state.borrowers:
        yield from borrowed()
    for request in state.requests.values():
        for sequence in request.sequences.values():
            yield sequence.blocks
