"""A request's way into the core: checked, entered in the table, its offer opened, its KV looked for, then added.

Requests that need no other service go straight in. The others wait for their calls in a task of their own, so that none
delays another; whatever goes wrong ends the request with an error to its sink.
"""

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass

import msgspec
import numpy as np
from numpy.typing import NDArray

from pdmesh.config import EngineConfig
from pdmesh.engine.block_key import block_keys, root_key
from pdmesh.engine.messages import AddRequest, CoreReady, DropHeld, HoldRequest
from pdmesh.engine.server.core_peers import Core
from pdmesh.engine.server.endings import Endings
from pdmesh.engine.server.expectations import Expectations
from pdmesh.engine.server.fetches import Tasks
from pdmesh.engine.server.handoff import Handoff
from pdmesh.engine.server.heart import Heart
from pdmesh.engine.server.load import LoadBoard
from pdmesh.engine.server.metrics import EngineMetrics
from pdmesh.engine.server.requests import RequestTable, RunningRequest, Sink
from pdmesh.engine.server.sources import Sources
from pdmesh.engine.server.transfer_params import FIELD, RemoteKV
from pdmesh.errors import (
    RETRY_AFTER_S,
    Draining,
    HandshakeRefused,
    InternalError,
    InvalidRequest,
    MeshError,
    Overloaded,
)
from pdmesh.protocol.context import tokens_to_hold
from pdmesh.protocol.messages import GenerateRequest, KVSource
from pdmesh.protocol.pushes import OFFER_ID_CHARS, is_offer_id

log = logging.getLogger(__name__)

MAX_REQUEST_ID_CHARS = 256
# As the API's largest n.
MAX_CHOICES = 16384
# The proxy's, made of a tenant's name and a client's own, is far below.
MAX_SALT_CHARS = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class StockLeg:
    """What a request's kv_transfer_params ask for."""

    offer: bool = False
    remote: RemoteKV | None = None


class Submission:
    """The one door for requests, from proxies and from this engine's own HTTP port."""

    def __init__(
        self,
        *,
        config: EngineConfig,
        ready: CoreReady,
        core: Core,
        table: RequestTable,
        board: LoadBoard,
        handoff: Handoff,
        sources: Sources,
        endings: Endings,
        expectations: Expectations,
        tasks: Tasks,
        metrics: EngineMetrics,
        heart: Heart,
    ) -> None:
        self._config = config
        self._ready = ready
        self._core = core
        self._table = table
        self._board = board
        self._handoff = handoff
        self._sources = sources
        self._endings = endings
        self._expectations = expectations
        self._tasks = tasks
        self._metrics = metrics
        self._heart = heart
        self.on_agreed: Callable[[RunningRequest], None] = lambda running: None
        """Called when a request that the core held is the core's."""
        self._num_calling = 0
        """Requests that wait for other services on their way to the core."""
        self._root = root_key(ready.model_fingerprint, ready.layout_fingerprints[0], 0)

    def submit(self, request: GenerateRequest, sink: Sink, leg: StockLeg | None = None) -> RunningRequest:
        """Accept a request; its deltas, or its error, go to `sink`. Never blocks.

        Raises Draining, PeerUnavailable, Overloaded, InvalidRequest or HandshakeRefused when it is not accepted: then `sink`
        hears nothing.
        """
        self._check_room()
        leg = leg or StockLeg()
        check_kv_role(self._config.kv_role, request, leg)
        tokens = check_request(request, self._ready)
        check_context(request, self._ready)
        if self._table.find(sink, request.request_id) is not None:
            raise InvalidRequest(f"request id {request.request_id!r} is running already", param="request_id")
        self._check_offer_id(request)
        check_awaited(request)
        running = self._table.add(request, sink, self._endings.overdue)
        running.tokens = tokens
        if request.prefill_only or leg.offer:
            self._handoff.open(running, stock=leg.offer)
        keys: list[bytes] = []
        if self._config.enable_prefix_caching:
            keys = block_keys(tokens, self._ready.block_size, root=self._root, cache_salt=request.cache_salt)
        if self._sources.needs_calls(running, leg.remote, keys):
            running.submission = self._tasks.create_task(self._submit_with_source(running, leg.remote, keys))
            if request.awaits is None:
                # Who waits for a prefill's offer has no turn here yet.
                self._num_calling += 1
                running.submission.add_done_callback(self._called)
        else:
            self._add(running, keys, None, recompute_last=False)
        return running

    def _called(self, submission: asyncio.Task[None]) -> None:
        self._num_calling -= 1

    def _check_room(self) -> None:
        if self._board.draining:
            raise Draining("this engine is shutting down; send new requests elsewhere")
        self._heart.check()
        num_queued = self._board.num_queued + self._num_calling
        if num_queued >= self._config.max_num_queued_reqs:
            self._metrics.admission_rejections.inc("max_num_queued_reqs")
            raise Overloaded(
                f"the engine has {num_queued} requests waiting, its limit (max-num-queued-reqs); retry later",
                retry_after_s=RETRY_AFTER_S,
            )

    def _check_offer_id(self, request: GenerateRequest) -> None:
        """Raise InvalidRequest for a name that cannot be an offer's here."""
        if not request.offer_id:
            return
        if not request.prefill_only or not is_offer_id(request.offer_id):
            raise InvalidRequest(
                f"offer_id must be {OFFER_ID_CHARS} hexadecimal digits, with prefill_only", param="offer_id"
            )
        if self._handoff.knows(request.offer_id):
            raise InvalidRequest("offer_id names an offer that there was before", param="offer_id")

    async def _submit_with_source(self, running: RunningRequest, remote: RemoteKV | None, keys: list[bytes]) -> None:
        running.owes_commit = running.request.is_handed_over

        def hold(source: KVSource | None) -> None:
            if source is None:
                self._drop_held(running)
            elif not self._expectations.awaits_push(running.ticket_offer_id):
                running.early = []
                self._core.send(HoldRequest(add=self._order(running, keys, source)))

        try:
            source = await self._sources.find(running, remote, keys, hold)
            push_id = await self._expectations.settled(running, running.ticket_offer_id)
            running.submission = None
            if running.fetch_failure:
                running.commit()
            # The last prompt token is computed again only where stock parameters promise no first token.
            fetched_stock = source is not None and remote is not None and not running.fetch_failure
            self._add(running, keys, source, recompute_last=fetched_stock, push_id=push_id)
        except MeshError as exc:
            running.submission = None
            self._endings.fail(running, exc)
        except Exception as exc:
            running.submission = None
            log.exception("request %s could not be submitted", running.request.request_id)
            self._endings.fail(running, InternalError(f"the request could not be submitted: {type(exc).__name__}"))
        finally:
            # Also of one that was aborted meanwhile.
            self._drop_held(running)

    def _drop_held(self, running: RunningRequest) -> None:
        """Have the core forget a request that it holds, or runs already; what it has said of it is nobody's."""
        if running.early is not None:
            running.early = None
            self._core.send(DropHeld(request_id=running.core_id))
            self._table.rename(running)

    def _add(
        self,
        running: RunningRequest,
        keys: list[bytes],
        source: KVSource | None,
        *,
        recompute_last: bool,
        push_id: str = "",
    ) -> None:
        running.in_core = True
        self._board.num_submitted += 1
        self._core.send(self._order(running, keys, source, recompute_last=recompute_last, push_id=push_id))
        if running.early is not None:
            self.on_agreed(running)

    def _order(
        self,
        running: RunningRequest,
        keys: list[bytes],
        source: KVSource | None,
        *,
        recompute_last: bool = False,
        push_id: str = "",
    ) -> AddRequest:
        request = running.request
        return AddRequest(
            request=msgspec.structs.replace(request, request_id=running.core_id, ticket=b"", awaits=None),
            offer_id=running.offer_id,
            source=source,
            block_keys=keys,
            recompute_last=recompute_last,
            push_id=push_id,
            digest=running.digest if running.offer_id or request.awaits is not None else b"",
            store_to_tier=bool(self._config.kvcache) and self._config.enable_prefix_caching,
            may_refetch=request.hand_back or self._sources.may_find_again(running),
        )


def check_kv_role(kv_role: str, request: GenerateRequest, leg: StockLeg) -> None:
    """Refuse the leg of a handoff that this engine's `kv-role` does not take: it is no failed fetch, so no policy applies.

    Raises InvalidRequest, that names the parameter, for a stock leg, and HandshakeRefused for a proxy's, which goes elsewhere.
    """
    if kv_role == "kv_producer" and (request.is_handed_over or leg.remote):
        problem, param = "this engine fetches no KV: its kv-role is kv_producer", "do_remote_prefill"
    elif kv_role == "kv_consumer" and (request.prefill_only or leg.offer):
        problem, param = "this engine offers no KV: its kv-role is kv_consumer", "do_remote_decode"
    else:
        return
    if leg.remote or leg.offer:
        raise InvalidRequest(f"{FIELD}.{param}: {problem}", param=f"{FIELD}.{param}")
    raise HandshakeRefused(problem)


def check_awaited(request: GenerateRequest) -> None:
    """Raise InvalidRequest for an awaited offer that no request can go on from."""
    if request.awaits is None:
        return
    if not is_offer_id(request.awaits.offer_id):
        raise InvalidRequest(f"awaits.offer_id must be {OFFER_ID_CHARS} hexadecimal digits", param="awaits")
    if request.ticket or request.prefill_only or request.emitted or len(request.choices) != 1:
        raise InvalidRequest(
            "awaits goes with one choice, and not with ticket, prefill_only or emitted", param="awaits"
        )


def check_context(request: GenerateRequest, ready: CoreReady) -> None:
    """Raise Overloaded, so that it goes elsewhere, for a leg that this context would end before what was admitted.

    `max_tokens` is what the whole mesh's context left when the request came; an engine with a smaller one would say "length".
    """
    num_prompt, num_emitted = len(request.token_ids), max(map(len, request.emitted), default=0)
    num_tokens = tokens_to_hold(
        num_prompt, request.sampling.max_tokens, num_emitted=num_emitted, prefill_only=request.prefill_only
    )
    # A prompt that does not fit either is the core's to refuse, unless others have begun with it.
    is_begun = num_prompt < ready.max_model_len or bool(request.emitted)
    if is_begun and num_tokens > ready.max_model_len:
        raise Overloaded(
            f"max_tokens: the prompt's {num_prompt} tokens and {num_tokens - num_prompt} to generate do not fit the context of "
            f"{ready.max_model_len} tokens",
            param="max_tokens",
        )


def check_request(request: GenerateRequest, ready: CoreReady) -> NDArray[np.int64]:
    """Return the prompt's tokens as an array, int64 [num_tokens], for all that is computed over them.

    Raises InvalidRequest for what this process cannot work with; the core checks the rest.
    """
    if not 0 < len(request.request_id) <= MAX_REQUEST_ID_CHARS:
        raise InvalidRequest(f"request_id must have 1 to {MAX_REQUEST_ID_CHARS} characters", param="request_id")
    if not request.token_ids:
        raise InvalidRequest("the prompt is empty; it needs at least one token", param="prompt")
    try:
        tokens = np.asarray(request.token_ids, dtype=np.int64)
    except OverflowError as exc:
        raise InvalidRequest("the prompt holds a token id beyond 64 bits", param="prompt") from exc
    if not 0 <= tokens.min() <= tokens.max() < ready.vocab_size:
        raise InvalidRequest(f"the prompt holds a token id outside 0…{ready.vocab_size - 1}", param="prompt")
    if len(request.cache_salt) > MAX_SALT_CHARS:
        raise InvalidRequest(
            f"cache_salt has {len(request.cache_salt)} characters, at most {MAX_SALT_CHARS} are taken",
            param="cache_salt",
        )
    if len(request.choices) > MAX_CHOICES:
        raise InvalidRequest(f"choices: {len(request.choices)} given, at most {MAX_CHOICES} are taken", param="n")
    if not request.choices or len(set(request.choices)) != len(request.choices):
        raise InvalidRequest("choices must be distinct, and at least one", param="n")
    return tokens
