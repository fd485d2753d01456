"""One request's share of an engine's data stream: a bounded buffer between the session's reader and the client's pace."""

import asyncio
import time
from collections.abc import Callable
from enum import Enum

from pdmesh.errors import MeshError, Overloaded, from_code
from pdmesh.protocol.messages import ChoiceDelta, GenerateRequest
from pdmesh_proxy.offers import HeldOffer

ALL_CHOICES = -1
# One frame may bring a token for each choice; room for some frames, or many choices would overflow with nobody slow.
BUFFERED_STEPS = 4


class LegEnd(Enum):
    """What closing a leg has to tell the engine."""

    NOTHING = "the engine has ended it, or is gone"
    ABORT = "the engine still works on it"


class Leg:
    """One request on one engine. Iterate for batches of deltas; leave its `with` block on every path.

    The session calls `put` and `fail`, neither of which blocks. Iterating raises what the engine or the session reported,
    after all deltas that came before it.
    """

    def __init__(
        self,
        request: GenerateRequest,
        *,
        buffer_tokens: int,
        on_abort: Callable[[str, int], None],
        on_started: Callable[["Leg"], None],
        on_closed: Callable[["Leg", LegEnd], None],
    ) -> None:
        self.request = request
        self.started = False
        """Whether the engine has answered at all."""
        self.overflowed = False
        self._buffer_tokens = buffer_tokens + BUFFERED_STEPS * len(request.choices)
        self._on_abort, self._on_started, self._on_closed = on_abort, on_started, on_closed
        self._open = set(request.choices)
        self._without_token = set(request.choices)
        self._deltas: list[ChoiceDelta] = []
        self._num_buffered = 0
        self._error: MeshError | None = None
        self._done = False
        self._end = LegEnd.ABORT
        self._closed = False
        self._waiter: asyncio.Future[None] | None = None
        self.may_move: Callable[[], bool] = lambda: False
        """Whether another engine could go on with the request now."""
        self.unread_offer: HeldOffer | None = None
        """Held since its ticket came in; that of a delta which nobody has read yet, or ever does."""
        self._num_tokens = 0
        self._began_s = 0.0
        """When its first token came; monotonic."""

    def __enter__(self) -> "Leg":
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        """Give the request back to the session; the engine is told to stop unless it has."""
        if not self._closed:
            self._closed = True
            self._on_closed(self, self._end)

    def __aiter__(self) -> "Leg":
        return self

    async def __anext__(self) -> list[ChoiceDelta]:
        while not self._deltas:
            if self._error is not None:
                raise self._error
            if self._done:
                raise StopAsyncIteration
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        deltas, self._deltas, self._num_buffered = self._deltas, [], 0
        return deltas

    def take_offer(self) -> HeldOffer | None:
        """Own the offer of a ticket that was read; None where the ticket is of no use."""
        offer, self.unread_offer = self.unread_offer, None
        return offer

    def put(self, delta: ChoiceDelta) -> bool:
        """Take one delta from the engine; whether somebody may read it yet."""
        if self._error is not None or self._done:
            return False
        if not self.started:
            self.started = True
            self._on_started(self)
        if delta.error_code:
            self._end = LegEnd.NOTHING
            self.fail(
                from_code(delta.error_code, delta.error_message, delta.error_param or None, self.request.request_id)
            )
            return False
        self._deltas.append(delta)
        self._num_buffered += max(1, len(delta.token_ids))
        self._note_progress(delta)
        if self._num_buffered > self._buffer_tokens and not self._done:
            self.overflowed = True
            self.give_up(Overloaded(f"the client read too slowly: {self._num_buffered} tokens were waiting for it"))
        self._wake()
        return True

    @property
    def has_failed(self) -> bool:
        """Whether it can only end with an error."""
        return self._error is not None

    def ends_within(self, seconds: float) -> bool:
        """Whether it ends in time at its own rate; one that has no rate yet does not."""
        if self.request.prefill_only or not self._num_tokens:
            return False
        most = self.request.sampling.max_tokens * len(self.request.choices) - sum(map(len, self.request.emitted))
        elapsed_s = time.monotonic() - self._began_s
        return (most - self._num_tokens) * elapsed_s / self._num_tokens <= seconds

    def move(self, error: MeshError) -> None:
        """Have the request go on elsewhere, if it can."""
        if self.may_move():
            self.give_up(error)

    def fail(self, error: MeshError) -> None:
        """End the leg with an error."""
        if self._error is None and not self._done:
            self._error = error
            self._wake()

    def lost(self, error: MeshError) -> None:
        """End the leg because nothing reaches the engine any more."""
        self._end = LegEnd.NOTHING
        self.fail(error)

    def give_up(self, error: MeshError) -> None:
        """End the leg and stop the engine now, however late the client comes to read of it."""
        if self._end is LegEnd.ABORT and not self._closed:
            self._end = LegEnd.NOTHING
            self._on_abort(self.request.request_id, ALL_CHOICES)
        self.fail(error)

    def stop_choice(self, choice: int) -> None:
        """Want no more of one choice; the leg is over with its last one."""
        if choice not in self._open or self._closed:
            return
        self._open.discard(choice)
        # A prefill leg's choices end by themselves; only giving up the whole leg gives up its offer.
        if not self.request.prefill_only:
            self._on_abort(self.request.request_id, choice)
            self._end = LegEnd.ABORT if self._open else LegEnd.NOTHING
        self._done = self._done or not self._open
        self._wake()

    def _note_progress(self, delta: ChoiceDelta) -> None:
        if delta.token_ids or delta.finish_reason:
            self._without_token.discard(delta.choice)
            self._began_s = self._began_s or time.monotonic()
            self._num_tokens += len(delta.token_ids)
        if delta.finish_reason:
            self._open.discard(delta.choice)
        prefilled = self.request.prefill_only and not self._without_token
        if delta.ticket or not self._open or prefilled:
            self._done, self._end = True, LegEnd.NOTHING

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
