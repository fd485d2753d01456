"""What a step's results do to a sequence: tokens computed, a token appended, the prompt done, the end reached."""

from dataclasses import dataclass, field

from pdmesh.engine.engine_state import EngineState
from pdmesh.engine.remote_kv import RemoteKV
from pdmesh.engine.request import Request, Sequence
from pdmesh.engine.states import Event
from pdmesh.errors import MeshError
from pdmesh.protocol.messages import TokenLogprobs


@dataclass(slots=True)
class RowResult:
    """What a step produced for one row; nothing for a chunk that does not reach the end of the sequence."""

    token_id: int | None = None
    logprobs: TokenLogprobs | None = None
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)
    """For the prompt positions behind each of the row's tokens."""
    error: MeshError | None = None
    """Ends this choice, and nothing else."""
    is_nan: bool = False


class Progress:
    """Applies results to the engine's state."""

    def __init__(self, state: EngineState, remote: RemoteKV) -> None:
        self._state = state
        self._remote = remote

    def advance(self, sequence: Sequence, num_tokens: int, result: RowResult) -> None:
        """Count `num_tokens` as computed and take in the token sampled behind them, if any."""
        if result.error is not None:
            self._state.counters.nan_requests += result.is_nan
            # The KV that led here may be as broken as the logits.
            self._state.kv.forget(sequence)
            self._state.finish(sequence, Event.FAILED, error=result.error)
            return
        first_new = len(sequence.prompt_logprobs) - sequence.num_computed - 1
        sequence.prompt_logprobs += result.prompt_logprobs[max(first_new, 0) :]
        sequence.num_computed += num_tokens
        self._state.kv.register(sequence)
        self.note_prompt(sequence)
        if result.token_id is not None:
            self._append(sequence, result.token_id, [] if result.logprobs is None else [result.logprobs])
        elif sequence.num_to_compute == 0:
            # Only prompt_logprobs were asked for.
            self._state.finish(sequence, Event.LENGTH_REACHED)

    def note_start(self, sequence: Sequence) -> None:
        """When the lead joins the batch with the prompt's KV from the one before it: let the next choice start too."""
        request = sequence.request
        if sequence is request.lead and request.is_prompt_computed and self._state.kv.holds_prompt(sequence):
            self._state.free_next(request, sequence)

    def note_prompt(self, sequence: Sequence) -> None:
        """When the lead has computed the prompt: seal the offer and tell the tier, once, and let the next choice start."""
        request = sequence.request
        if sequence is not request.lead or sequence.num_computed < request.num_prompt:
            return
        if not request.is_prompt_computed:
            request.is_prompt_computed = True
            if request.offer_id:
                self._remote.seal_offer(sequence)
            if request.store_to_tier:
                self._remote.report_computed(sequence)
        self._state.free_next(request, sequence)

    def is_at_end(self, request: Request, num_output: int) -> bool:
        """Whether a choice with `num_output` generated tokens may have no further one."""
        return num_output > 0 and (
            num_output >= request.sampling.max_tokens
            or request.num_prompt + num_output >= self._state.limits.max_model_len
        )

    def _append(self, sequence: Sequence, token_id: int, logprobs: list[TokenLogprobs]) -> None:
        sequence.tokens.append(token_id)
        event = self._end_after(sequence, token_id)
        if event is None:
            self._state.report(sequence, token_ids=[token_id], logprobs=logprobs)
            return
        is_eos = token_id in self._state.limits.eos_token_ids and not sequence.request.sampling.ignore_eos
        stop_token_id = token_id if event is Event.STOPPED and not is_eos else None
        self._state.finish(sequence, event, token_ids=[token_id], logprobs=logprobs, stop_token_id=stop_token_id)

    def _end_after(self, sequence: Sequence, token_id: int) -> Event | None:
        """Return how the sequence ends with the token just appended, or None."""
        sampling = sequence.request.sampling
        if sequence.num_output >= sampling.min_tokens:
            if not sampling.ignore_eos and token_id in self._state.limits.eos_token_ids:
                return Event.STOPPED
            if token_id in sampling.stop_token_ids:
                return Event.STOPPED
        if self.is_at_end(sequence.request, sequence.num_output):
            return Event.LENGTH_REACHED
        return Event.HANDED_OFF if sequence.request.prefill_only else None
