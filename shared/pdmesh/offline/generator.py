"""A Generator straight on an engine core, for one process that is both client and server: no peers, no offers, no sockets."""

import asyncio
import itertools
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

import msgspec

from pdmesh.engine.core_client import CoreClient
from pdmesh.engine.messages import (
    Abort,
    AddRequest,
    CoreFailed,
    PrefixCacheReset,
    StepOutput,
    encode,
    to_core_decoder,
)
from pdmesh.engine.server.prefix_cache_reset import PrefixCacheResets
from pdmesh.engine.stats import Stats
from pdmesh.errors import InternalError, InvalidRequest, MeshError, from_code
from pdmesh.openai.generator import BEAM_SEARCH, DIRECT, Generator, ModelCard, TokenRequest
from pdmesh.protocol.messages import ChoiceDelta, GenerateRequest

ENGINE_ID = "offline"


@dataclass(slots=True)
class _Running:
    """One request between the core and whoever iterates; None in the queue wakes the iterator."""

    core_id: str
    open_choices: set[int]
    deltas: asyncio.Queue[ChoiceDelta | None] = field(default_factory=asyncio.Queue)


class CoreGenerator(Generator):
    """`run` must be running for anything to come."""

    def __init__(self, core: CoreClient, *, name: str, root: str) -> None:
        self._core = core
        self._card = ModelCard(
            name=name,
            root=root,
            # Files for a batch name the model as the command line does.
            aliases=() if root == name else (root,),
            max_model_len=core.ready.max_model_len,
            created_s=int(time.time()),
            vocab_size=core.ready.vocab_size,
        )
        self._running: dict[str, _Running] = {}
        self._core_ids: dict[str, str] = {}
        self._numbers = itertools.count()
        self._failure: MeshError | None = None
        self._resets = PrefixCacheResets(core)
        self.stats = Stats()
        """The core's latest gauges and counters."""

    async def run(self) -> None:
        """Hand out what the core says until it has ended; then every request fails."""
        failure: MeshError | None = None
        async for message in self._core.outputs():
            match message:
                case StepOutput():
                    for delta in message.deltas:
                        self._deliver(delta)
                    self.stats = message.stats or self.stats
                case PrefixCacheReset():
                    self._resets.done(message)
                case CoreFailed():
                    failure = from_code(message.code, message.message)
                case _:
                    # A core without connectors has nothing to say of peers.
                    continue
        self._failure = failure or InternalError(f"the engine core died: {await self._core.died()}")
        for running in self._running.values():
            running.deltas.put_nowait(None)
        self._resets.fail(self._failure)

    async def card(self) -> ModelCard:
        return self._card

    async def problem(self) -> str:
        return "" if self._failure is None else "the engine core died"

    async def reset_prefix_cache(self) -> None:
        """Return when nothing that was computed before can be found any more. Raises MeshError."""
        if self._failure is not None:
            raise self._failure
        await self._resets.reset()

    async def generate(self, request: TokenRequest) -> AsyncIterator[ChoiceDelta]:
        running = self._submit(request)
        self._running[running.core_id] = running
        self._core_ids[request.request_id] = running.core_id
        try:
            while running.open_choices:
                delta = await running.deltas.get()
                if self._failure is not None:
                    raise self._failure
                if delta is None or delta.choice not in running.open_choices:
                    continue
                if delta.error_code:
                    raise from_code(
                        delta.error_code, delta.error_message, delta.error_param or None, request.request_id
                    )
                if delta.finish_reason:
                    running.open_choices.discard(delta.choice)
                yield delta
        finally:
            del self._running[running.core_id]
            del self._core_ids[request.request_id]
            if running.open_choices:
                self._core.send(Abort(request_id=running.core_id))

    async def abort_choice(self, request_id: str, choice: int) -> None:
        running = self._running.get(self._core_ids.get(request_id, ""))
        if running is None or choice not in running.open_choices:
            return
        running.open_choices.discard(choice)
        self._core.send(Abort(request_id=running.core_id, choice=choice))
        running.deltas.put_nowait(None)

    def _submit(self, request: TokenRequest) -> _Running:
        if self._failure is not None:
            raise self._failure
        choices = list(range(request.sampling.n))
        running = _Running(f"{request.request_id}#{next(self._numbers)}", set(choices))
        request.trace.decode, request.trace.reason = ENGINE_ID, BEAM_SEARCH if request.beam_search else DIRECT
        add = AddRequest(
            request=GenerateRequest(
                request_id=running.core_id,
                token_ids=request.token_ids,
                sampling=request.sampling,
                choices=choices,
                cache_salt=request.cache_salt,
                priority=request.priority,
                deadline_s=request.deadline_s,
            )
        )
        _check_readable(add)
        self._core.send(add)
        return running

    def _deliver(self, delta: ChoiceDelta) -> None:
        running = self._running.get(delta.request_id)
        # Of what was aborted, tokens may have been on the way.
        if running is not None:
            running.deltas.put_nowait(delta)


def _check_readable(add: AddRequest) -> None:
    """Raise InvalidRequest for what the core could not decode: it would be dropped there, and never answered."""
    try:
        to_core_decoder.decode(encode(add))
    except (msgspec.MsgspecError, UnicodeError, TypeError, OverflowError) as exc:
        raise InvalidRequest(f"the request cannot be sent to the engine: {exc}") from exc
