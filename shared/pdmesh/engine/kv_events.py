"""What happens to the prefix cache's names, as KV events in vLLM's msgpack format, collected by the core between two outputs.

A batch is the array [seconds since the epoch, events, data-parallel rank]; an event is a map whose `type` is its class, or
for consumers made for vLLM before 0.32 an array of the class's name and the fields in order.
External indexers (llm-d's, vllm-router's) follow these to know which engine holds which prefix. The server publishes batches
as they come from here, without looking inside.
"""

import logging
import time
from collections.abc import Sequence

import msgspec

from pdmesh.engine.block_hash import NO_EXTRA_KEYS, ExtraKeys
from pdmesh.engine.kv_groups import KVGroup

log = logging.getLogger(__name__)

# vLLM's name of the memory that steps compute in, on CPUs too; "CPU" is for blocks that were moved out of it.
MEDIUM = "GPU"
SPEC_KINDS = {"full": "full_attention", "sliding": "sliding_window"}
# Far above what steps between two outputs can cause; a log that nobody takes must not grow.
MAX_EVENTS = 1 << 16
LOW_64_BITS = (1 << 64) - 1

BlockHash = bytes | int


class BlockStored(msgspec.Struct, kw_only=True, tag=True, omit_defaults=True, gc=False):
    """Full blocks, one after the other, can be found now."""

    block_hashes: list[BlockHash]
    parent_block_hash: BlockHash | None
    """Name of the block before them; None: they begin a sequence."""
    token_ids: list[int]
    """Of all these blocks."""
    block_size: int
    lora_id: int | None
    """Always None: LoRAs go by name."""
    medium: str | None
    lora_name: str | None
    extra_keys: list[tuple[str, ...] | None] | None = None
    """For each block the values that separate its name from that of the bare tokens."""
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None
    kv_cache_spec_sliding_window: int | None = None


class BlockRemoved(msgspec.Struct, kw_only=True, tag=True, omit_defaults=True, gc=False):
    """Blocks of one group cannot be found any more."""

    block_hashes: list[BlockHash]
    medium: str | None
    group_idx: int | None = None


class AllBlocksCleared(msgspec.Struct, kw_only=True, tag=True, omit_defaults=True, gc=False):
    """No block of any group can be found any more."""


KVEvent = BlockStored | BlockRemoved | AllBlocksCleared


class _StoredArray(BlockStored, kw_only=True, tag="BlockStored", array_like=True, omit_defaults=True, gc=False):
    pass


class _RemovedArray(BlockRemoved, kw_only=True, tag="BlockRemoved", array_like=True, omit_defaults=True, gc=False):
    pass


class _ClearedArray(AllBlocksCleared, kw_only=True, tag="AllBlocksCleared", array_like=True, gc=False):
    pass


class KVEventBatch(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):
    """The events between two outputs of the core, in order."""

    ts: float
    events: list[KVEvent]
    data_parallel_rank: int | None = None


_encode = msgspec.msgpack.Encoder().encode


class KVEventLog:
    """Collects events. Who has none, because events are off, has nothing to do."""

    def __init__(
        self, groups: Sequence[KVGroup], *, use_int_block_hashes: bool = True, as_arrays: bool = False
    ) -> None:
        """With `use_int_block_hashes` a name is told as its last 64 bits, which is what vLLM does unless told otherwise."""
        self._groups = list(groups)
        self._stored = _StoredArray if as_arrays else BlockStored
        self._removed = _RemovedArray if as_arrays else BlockRemoved
        self._cleared = _ClearedArray if as_arrays else AllBlocksCleared
        self._use_int = use_int_block_hashes
        self._events: list[KVEvent] = []

    @property
    def has_events(self) -> bool:
        """Whether there is anything to take."""
        return bool(self._events)

    def stored(
        self,
        group: int,
        keys: Sequence[bytes],
        parent_key: bytes | None,
        token_ids: list[int],
        block_size: int,
        extras: ExtraKeys = NO_EXTRA_KEYS,
    ) -> None:
        """Note that consecutive blocks of a group are findable: `token_ids` are theirs, `parent_key` the block before."""
        rest = extras.untagged(is_first=False)
        extra_keys = [rest] * len(keys)
        if parent_key is None:
            extra_keys[0] = extras.untagged(is_first=True)
        rule = self._groups[group]
        self._append(
            self._stored(
                block_hashes=self._shown(keys),
                parent_block_hash=None if parent_key is None else self._shown([parent_key])[0],
                token_ids=token_ids,
                block_size=block_size,
                lora_id=None,
                medium=MEDIUM,
                lora_name=extras.lora_name or None,
                extra_keys=extra_keys,
                group_idx=group,
                kv_cache_spec_kind=SPEC_KINDS[rule.kind],
                kv_cache_spec_sliding_window=rule.window or None,
            )
        )

    def removed(self, group: int, keys: Sequence[bytes]) -> None:
        """Note that blocks of a group have lost their names."""
        last = self._events[-1] if self._events else None
        if isinstance(last, BlockRemoved) and last.group_idx == group and len(last.block_hashes) < MAX_EVENTS:
            last.block_hashes += self._shown(keys)
        else:
            self._append(self._removed(block_hashes=self._shown(keys), medium=MEDIUM, group_idx=group))

    def cleared(self) -> None:
        """Note that no block has a name any more. What was noted before is void."""
        self._events = [self._cleared()]

    def take(self) -> bytes:
        """Return what was noted since the last call as one encoded KVEventBatch; empty when that is nothing."""
        if not self._events:
            return b""
        batch = KVEventBatch(time.time(), self._events, 0)
        self._events = []
        return _encode(batch)

    def _append(self, event: KVEvent) -> None:
        if len(self._events) >= MAX_EVENTS:
            log.warning(
                "more than %d KV events between two outputs: consumers are told that nothing is cached", MAX_EVENTS
            )
            self.cleared()
        self._events.append(event)

    def _shown(self, keys: Sequence[bytes]) -> list[BlockHash]:
        if self._use_int:
            return [int.from_bytes(key, "big") & LOW_64_BITS for key in keys]
        return list(keys)
