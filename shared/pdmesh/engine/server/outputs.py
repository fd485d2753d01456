"""What the core sends, on its way out: deltas to whoever waits for them, offers sealed, pulls ended, blocks for the tier.

A step's messages are handled in one go without waiting, so that all its deltas of one session leave in one frame.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from typing import Protocol

import msgspec

from pdmesh.connector.active import PullEnd
from pdmesh.engine.messages import (
    ConnectorChanged,
    CoreFailed,
    FromCore,
    NeedsSource,
    OfferPublished,
    OwnBlockPulled,
    PeerConnected,
    PrefixCacheReset,
    StepOutput,
    TransferEnded,
)
from pdmesh.engine.push_messages import PUSH_SOURCE, PushExpected, WritersShutOut
from pdmesh.engine.server.core_peers import CorePeers
from pdmesh.engine.server.endings import Endings
from pdmesh.engine.server.expectations import Expectations
from pdmesh.engine.server.fetches import Fetches, HandoffEvent, HandoffStage
from pdmesh.engine.server.handoff import Handoff
from pdmesh.engine.server.heart import Heart
from pdmesh.engine.server.kv_event_publisher import KVEventPublisher
from pdmesh.engine.server.kv_probe import KVProbe
from pdmesh.engine.server.load import LoadBoard
from pdmesh.engine.server.metrics import ADMISSION_LIMITS, EngineMetrics
from pdmesh.engine.server.prefix_cache_reset import PrefixCacheResets
from pdmesh.engine.server.requests import RequestTable, RunningRequest
from pdmesh.engine.server.returns import Returns
from pdmesh.engine.server.tier_client import TierClient
from pdmesh.errors import from_code
from pdmesh.protocol.messages import ChoiceDelta
from pdmesh.protocol.states import ABORT_REASONS

RETURNED = "preempted:"
"""How `kv_source` begins of a choice that has lost its KV and runs again."""
SERVED = ("stop", "length", "repetition")
"""How choices end whose prompt has been computed."""


class CoreOutputs(Protocol):
    """Where the core's messages come from."""

    def outputs(self) -> AsyncIterator[FromCore]: ...


class Outputs:
    """Hands each message of the core to the part it concerns."""

    def __init__(
        self,
        *,
        table: RequestTable,
        board: LoadBoard,
        handoff: Handoff,
        fetches: Fetches,
        endings: Endings,
        expectations: Expectations,
        core_peers: CorePeers,
        tier: TierClient | None,
        metrics: EngineMetrics,
        resets: PrefixCacheResets,
        publisher: KVEventPublisher | None,
        heart: Heart,
        probe: KVProbe,
        returns: Returns,
    ) -> None:
        self._table = table
        self._board = board
        self._handoff = handoff
        self._fetches = fetches
        self._endings = endings
        self._expectations = expectations
        self._core_peers = core_peers
        self._tier = tier
        self._metrics = metrics
        self._resets = resets
        self._publisher = publisher
        self._heart = heart
        self._probe = probe
        self._returns = returns
        self._num_steps = 0
        self._step_begun_s = self._step_ended_s = 0.0

    async def run(self, core: CoreOutputs) -> None:
        """Handle messages until the core is gone. Raises the error of a core that says it cannot go on."""
        async for message in core.outputs():
            self._heart.heard()
            match message:
                case StepOutput():
                    for sealed in message.sealed:
                        self._handoff.sealed(sealed)
                    if self._wake_consumers(message):
                        # Decode's next token waits for it: tickets, logs and metrics do not hold it up.
                        await asyncio.sleep(0)
                    self._step(message)
                case PeerConnected():
                    self._core_peers.connected(message)
                case ConnectorChanged():
                    self._probe.changed(message.connector, message.metadata)
                case OfferPublished():
                    self._handoff.published(message)
                case OwnBlockPulled():
                    self._probe.pulled(message)
                case PushExpected():
                    self._expectations.planned(message)
                case WritersShutOut():
                    self._expectations.writers.shut_out(message)
                case PrefixCacheReset():
                    self._resets.done(message)
                case CoreFailed():
                    raise from_code(message.code, message.message)

    def _wake_consumers(self, output: StepOutput) -> bool:
        """Tell who waits for an offer that a step completed; whether anybody does."""
        woken = False
        for delta in output.deltas:
            running = self._table.get(delta.request_id)
            if running is not None and running.request.prefill_only and delta.token_ids and not delta.finish_reason:
                woken = self._handoff.drawn(running, delta.token_ids) or woken
        return woken

    def _step(self, output: StepOutput) -> None:
        if output.kv_events and self._publisher is not None:
            self._publisher.publish(output.kv_events)
        for push in output.pushes:
            self._handoff.pushes.report(push)
        for landing in output.landings:
            self._expectations.landed(landing)
        now = time.monotonic()
        self._step_begun_s, self._step_ended_s = output.begun_s or now, output.ended_s or now
        self._take([*output.transfers, *output.deltas, *output.needs], now)
        if self._tier is not None:
            for computed in output.computed:
                self._tier.store(computed)
        if output.stats is not None:
            if output.stats.steps > self._num_steps and output.stats.step_tokens:
                self._metrics.iteration_tokens.observe(output.stats.step_tokens)
            self._num_steps = output.stats.steps
            self._board.update(output.stats)

    def replay(self, running: RunningRequest) -> None:
        """Take in what the core said of a request before the owner of its KV had agreed."""
        early, running.early = running.early, None
        self._take(early or [], time.monotonic())

    def _take(self, messages: Sequence[TransferEnded | ChoiceDelta | NeedsSource], now: float) -> None:
        num_tokens = 0
        for message in messages:
            running = self._table.get(message.request_id)
            if running is not None and running.early is not None:
                running.early.append(message)
            elif isinstance(message, TransferEnded):
                self._transfer_ended(message)
            elif isinstance(message, NeedsSource):
                self._returns.asked(message)
            # Choices that were aborted may have had tokens on the way.
            elif running is not None and message.choice in running.open_choices:
                num_tokens += len(message.token_ids)
                self._deliver(running, message, now)
        if num_tokens:
            self._metrics.generation_tokens.inc(num_tokens)

    def _transfer_ended(self, message: TransferEnded) -> None:
        fetch = self._fetches.ended(message)
        if fetch is None:
            return
        running = fetch.running
        if message.committed and message.num_bytes:
            running.kv_bytes += message.num_bytes
            if running.kv_source != PUSH_SOURCE:
                running.kv_source = fetch.source
        elif not message.committed and message.reason not in ABORT_REASONS:
            # A client that left is no fallback. What follows the colon names blocks: no label should.
            self._metrics.fallbacks.inc(message.reason.partition(":")[0])
        running.is_in_doubt = message.reason == PullEnd.CORRUPT and not message.committed
        # What came with damaged KV is drawn again first: whoever goes on elsewhere before that must look for itself.
        if not running.is_in_doubt and self._table.get(running.core_id) is running:
            running.commit()

    def _deliver(self, running: RunningRequest, delta: ChoiceDelta, now: float) -> None:
        if delta.error_param in ADMISSION_LIMITS:
            delta = self._count_rejection(running, delta)
        returned = delta.kv_source if delta.kv_source.startswith(RETURNED) else ""
        if returned:
            self._metrics.preempted.inc(returned.removeprefix(RETURNED))
        first = not running.has_answered and bool(delta.token_ids or delta.finish_reason)
        if first:
            self._note_first(running, delta)
        self._measure(running, delta, now)
        if running.is_in_doubt and running.open_choices <= running.last_token_s.keys():
            running.commit()
        delta = msgspec.structs.replace(
            delta,
            request_id=running.request.request_id,
            kv_committed=False,
            cached_tokens=running.num_cached if first else 0,
            kv_bytes=running.kv_bytes if first else 0,
            kv_source=returned or (running.kv_source if first else ""),
        )
        if running.request.prefill_only:
            self._deliver_first_token(running, delta)
            return
        if delta.finish_reason:
            running.open_choices.discard(delta.choice)
            running.finish_reason = delta.finish_reason
        running.sink.put(delta)
        if not running.open_choices:
            self._endings.finish(running, keep_offer=delta.finish_reason in SERVED)

    def _count_rejection(self, running: RunningRequest, delta: ChoiceDelta) -> ChoiceDelta:
        """A request that the core's queue had no room for, counted once; no field of the request is at fault."""
        if delta.choice == running.request.choices[0]:
            self._metrics.admission_rejections.inc(delta.error_param)
        return msgspec.structs.replace(delta, error_param="")

    def _deliver_first_token(self, running: RunningRequest, delta: ChoiceDelta) -> None:
        """A prefill-only choice ends with its first token; the last one to have it takes the ticket along."""
        if delta.token_ids or delta.finish_reason:
            running.open_choices.discard(delta.choice)
            running.first_tokens[delta.choice] = delta.token_ids
            running.finish_reason = delta.finish_reason or "length"
            if not delta.finish_reason:
                running.unfinished.add(delta.choice)
        if running.open_choices:
            running.sink.put(delta)
            return
        ticket = b""
        if running.unfinished:
            ticket = self._handoff.ticket(running)
            if not ticket:
                # The proxy goes on without KV; that must not pass unseen.
                self._metrics.fallbacks.inc("not_sealed")
            else:
                self._metrics.handoff.observe(HandoffStage.SEALED, time.monotonic() - self._step_ended_s)
                self._metrics.handoff_clock.set(HandoffEvent.COMPUTED, self._step_ended_s)
        running.sink.put(msgspec.structs.replace(delta, ticket=ticket))
        self._endings.finish(running, keep_offer=bool(ticket))

    def _note_first(self, running: RunningRequest, delta: ChoiceDelta) -> None:
        running.has_answered = True
        if running.pulled_s is not None:
            self._metrics.handoff.observe(HandoffStage.RESUME, time.monotonic() - running.pulled_s)
            self._metrics.handoff_clock.set(HandoffEvent.RESUMED, self._step_begun_s)
            running.pulled_s = None
        running.num_cached = delta.cached_tokens
        running.queued_s = delta.queued_s
        if running.fetch_failure:
            running.kv_source = f"recompute:{running.fetch_failure}"
        elif not running.kv_source or delta.kv_source.startswith(("recompute", RETURNED)):
            running.kv_source = delta.kv_source
        self._metrics.prompt_tokens.inc(len(running.request.token_ids))
        self._metrics.prompt_tokens_cached.inc(delta.cached_tokens)

    def _measure(self, running: RunningRequest, delta: ChoiceDelta, now: float) -> None:
        if not delta.token_ids:
            return
        if running.first_token_s is None:
            running.first_token_s = now
            self._metrics.ttft.observe(now - running.arrived_s)
        last = running.last_token_s.get(delta.choice)
        if last is not None:
            self._metrics.itl.observe(now - last)
        running.last_token_s[delta.choice] = now
        running.num_generated += len(delta.token_ids)
