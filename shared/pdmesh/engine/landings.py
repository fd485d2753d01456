"""KV that comes in while another engine computes it: blocks of this pool that a peer writes, and that requests find as cached.

A landing holds what is cached already of an expected prompt, and blocks for the rest of its full ones. As the writer says that
blocks are written they become findable by their names, as if they had been computed here. What it holds goes back when the
expected request has come or nobody waits any more, but for blocks that may still be written: those stay, in quarantine,
until the writer has stopped (`LANDING_TABLE`). Who needs room takes it from landings first.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from pdmesh.connector.ledger import BlockLists
from pdmesh.engine.block_hash import ExtraKeys
from pdmesh.engine.engine_state import EngineState
from pdmesh.engine.push_messages import (
    ALL_CACHED,
    PRESSURE,
    PUSH_SOURCE,
    EndPush,
    ExpectPush,
    LandingReport,
    PushArrived,
    PushExpected,
)
from pdmesh.engine.request import Sequence
from pdmesh.protocol.states import LANDING_TABLE, LandingEvent, LandingState

# Of the pool, for all landings and what is cached of their prompts; and of what is free, for one: requests that run must not
# lose their blocks to guests.
MAX_SHARE = 0.5
MAX_SHARE_OF_FREE = 0.5
NO_ROOM, NOT_CACHED, WINDOWS = "no_room", "no_prefix_cache", "windows"


@dataclass(slots=True, kw_only=True)
class _Landing:
    """One expected prompt."""

    keys: list[bytes]
    """Names of its full blocks."""
    token_ids: NDArray[np.int64]
    extra_keys: ExtraKeys
    first: int
    """Index of the first block that is missing here."""
    cached: BlockLists
    """The blocks before that one."""
    targets: BlockLists
    num_arrived: int = 0
    """Leading targets that hold their content."""
    state: LandingState = LandingState.EXPECTED
    """Of the targets that have not arrived."""
    is_wanted: bool = True
    may_register: bool = True

    @property
    def num_targets(self) -> int:
        return len(self.targets[0])

    @property
    def held(self) -> BlockLists:
        """Blocks that nobody else gets: what there is of the prompt, as long as it is wanted, and what a peer may write."""
        is_awaited = self.state in (LandingState.EXPECTED, LandingState.QUARANTINED)
        arrived = [*self.cached, *self.part(0, self.num_arrived)] if self.is_wanted else []
        return arrived + (self.part(self.num_arrived, self.num_targets) if is_awaited else [])

    def part(self, start: int, end: int) -> BlockLists:
        return [table[start:end] for table in self.targets]


class Landings:
    """All pushes that this engine expects."""

    def __init__(self, state: EngineState) -> None:
        self._state = state
        self._landings: dict[str, _Landing] = {}
        self.num_pushed_tokens = 0
        """Prompt tokens found by requests, since start."""

    @property
    def num_quarantined(self) -> int:
        """Blocks that nobody wants and a peer may still write."""
        waiting = (each for each in self._landings.values() if each.state is LandingState.QUARANTINED)
        return sum(len(each.targets) * (each.num_targets - each.num_arrived) for each in waiting)

    def expect(self, order: ExpectPush) -> None:
        """Make room for a prompt's missing full blocks; the answer says where they are to be written."""
        token_ids = np.array(order.token_ids, dtype=np.int64)
        extra_keys = ExtraKeys(cache_salt=order.cache_salt)
        kv = self._state.kv
        if obstacle := self._obstacle():
            self._refuse(order, obstacle)
            return
        keys = kv.prompts.keys(token_ids, extra_keys)
        cached = kv.prompts.find_run(keys)
        first = len(cached[0])
        # What is cached is free to be taken, too, unless it is held.
        kv.prompts.acquire(cached)
        if obstacle := self._refusal(cached, len(keys) - first):
            kv.drop(cached)
            self._refuse(order, obstacle)
            return
        targets = kv.prompts.take(len(keys) - first)
        self._state.ledger.keep_pushed(_found(order.transfer_id), cached)
        self._state.ledger.keep_pushed(_missing(order.transfer_id), targets)
        self._landings[order.transfer_id] = _Landing(
            keys=keys, token_ids=token_ids, extra_keys=extra_keys, first=first, cached=cached, targets=targets
        )
        self._state.outbox.expected.append(
            PushExpected(transfer_id=order.transfer_id, first_block=first, blocks=[list(table) for table in targets])
        )

    def arrived(self, message: PushArrived) -> None:
        """Blocks hold their content: let requests find them."""
        landing = self._landings.get(message.transfer_id)
        if landing is None or landing.state is not LandingState.EXPECTED:
            return
        start, end = landing.num_arrived, min(message.num_blocks, landing.num_targets)
        if end <= start:
            return
        blocks, ledger = landing.part(start, end), self._state.ledger
        landing.num_arrived = end
        if landing.may_register:
            self._state.kv.prompts.register(
                blocks, landing.first + start, landing.keys, landing.token_ids, landing.extra_keys
            )
        ledger.drop_pushed(_missing(message.transfer_id))
        ledger.keep_pushed(_missing(message.transfer_id), landing.part(end, landing.num_targets))
        ledger.keep_pushed(_found(message.transfer_id), blocks)

    def end(self, message: EndPush) -> None:
        """The writer has stopped, nobody will come, or both."""
        landing = self._landings.get(message.transfer_id)
        if landing is None:
            return
        if message.is_broken:
            self._state.kv.prompts.forget(landing.part(0, landing.num_arrived), landing.first, landing.keys)
        if message.is_stopped:
            self._stopped(message.transfer_id, landing)
        if message.is_unwanted or message.is_broken:
            self._let_go(message.transfer_id, landing)

    def claim(self, sequence: Sequence, num_hit_tokens: int) -> None:
        """A request that a push was expected for has its place, on so many cached tokens: the landing has served its purpose."""
        push_id, sequence.request.push_id = sequence.request.push_id, ""
        landing = self._landings.get(push_id)
        if landing is None or not landing.is_wanted:
            return
        num_found = min(num_hit_tokens // self._state.kv.block_size - landing.first, landing.num_arrived)
        num_tokens = max(num_found, 0) * self._state.kv.block_size
        if num_tokens:
            sequence.kv_source = PUSH_SOURCE
            self.num_pushed_tokens += num_tokens
        self._let_go(push_id, landing)
        self._state.outbox.landings.append(LandingReport(transfer_id=push_id, num_tokens=num_tokens))

    def give_way(self) -> bool:
        """Let go of all that can be, for a request that finds no room; whether there was anything."""
        num_free = self._state.kv.num_free
        for transfer_id, landing in list(self._landings.items()):
            if landing.is_wanted:
                self._let_go(transfer_id, landing)
                self._state.outbox.landings.append(LandingReport(transfer_id=transfer_id, reason=PRESSURE))
        return self._state.kv.num_free > num_free

    def reset(self) -> None:
        """The prefix cache has been emptied: what arrives from now on is not named any more."""
        for landing in self._landings.values():
            landing.may_register = False

    def _obstacle(self) -> str:
        kv = self._state.kv
        if not kv.enable_prefix_caching:
            return NOT_CACHED
        return WINDOWS if any(group.window for group in kv.groups) else ""

    def _refusal(self, cached: BlockLists, num_missing: int) -> str:
        """Why so many blocks are not taken for a push, beside what is cached for it; empty when they are."""
        kv = self._state.kv
        if not num_missing:
            return ALL_CACHED
        num_wanted = num_missing * len(kv.groups)
        # A beginning that several prompts share is held once.
        held = {block_id for each in self._landings.values() for table in each.held for block_id in table}
        num_held = len(held.union(*cached))
        fits = num_held + num_wanted <= MAX_SHARE * kv.num_blocks and num_wanted <= MAX_SHARE_OF_FREE * kv.num_free
        return "" if fits else NO_ROOM

    def _refuse(self, order: ExpectPush, reason: str) -> None:
        self._state.outbox.expected.append(PushExpected(transfer_id=order.transfer_id, reason=reason))

    def _stopped(self, transfer_id: str, landing: _Landing) -> None:
        if landing.state not in (LandingState.EXPECTED, LandingState.QUARANTINED):
            return
        has_all = landing.num_arrived == landing.num_targets
        landing.state = LANDING_TABLE[landing.state, LandingEvent.ARRIVED if has_all else LandingEvent.STOPPED]
        self._drop(_missing(transfer_id))
        self._forget_if_over(transfer_id, landing)

    def _let_go(self, transfer_id: str, landing: _Landing) -> None:
        landing.is_wanted = False
        if landing.state is LandingState.EXPECTED:
            landing.state = LANDING_TABLE[landing.state, LandingEvent.UNWANTED]
        self._drop(_found(transfer_id))
        self._forget_if_over(transfer_id, landing)

    def _forget_if_over(self, transfer_id: str, landing: _Landing) -> None:
        if not landing.is_wanted and landing.state in (LandingState.USABLE, LandingState.FENCED):
            self._landings.pop(transfer_id, None)

    def _drop(self, key: str) -> None:
        self._state.kv.drop(self._state.ledger.drop_pushed(key))


def _found(transfer_id: str) -> str:
    """Key of the references to blocks that hold their content."""
    return f"{transfer_id}+found"


def _missing(transfer_id: str) -> str:
    """Key of the references to blocks that may still be written."""
    return f"{transfer_id}+missing"
