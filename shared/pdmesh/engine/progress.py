"""What a step's results do to its sequences: tokens computed, a token appended, the prompt done, the end reached."""

from pdmesh import errors
from pdmesh.engine.comebacks import Comebacks
from pdmesh.engine.damage import token_error
from pdmesh.engine.engine_state import EngineState
from pdmesh.engine.plan import NO_TOKEN, RowFailure, StepPlan, StepResult
from pdmesh.engine.remote_kv import RemoteKV
from pdmesh.engine.repetition import ends_in_repetition
from pdmesh.engine.request import NO_ROW, Request, Sequence
from pdmesh.engine.states import Event
from pdmesh.protocol.messages import TokenLogprobs


class Progress:
    """Applies results to the engine's state."""

    def __init__(self, state: EngineState, remote: RemoteKV, comebacks: Comebacks) -> None:
        self._state = state
        self._remote = remote
        self._comebacks = comebacks
        self._eos = state.limits.eos_token_ids

    def advance(self, sequence: Sequence, index: int, plan: StepPlan, result: StepResult) -> None:
        """Take in what row `index` of a step brought: its tokens count as computed, and the sampled one is appended.

        A sequence that has ended meanwhile is left alone. One that was preempted meanwhile has lost the KV, not the token.
        """
        if sequence.row == NO_ROW and sequence.is_finished:
            return
        if result.failures and (failure := result.failures.get(index)) is not None:
            self._fail(sequence, failure)
            return
        if result.prompt_logprobs and (logprobs := result.prompt_logprobs.get(index)) is not None:
            # Those of positions that were computed before a preemption are here already.
            sequence.prompt_logprobs += logprobs[max(len(sequence.prompt_logprobs) - plan.starts[index] - 1, 0) :]
        if sequence.row != NO_ROW:
            self._count(sequence, plan.counts[index])
        token_id = result.token_ids[index]
        if token_id != NO_TOKEN:
            self._append(sequence, token_id, result.logprobs.get(index))
        elif sequence.num_computed == sequence.num_wanted:
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
            self._state.note_prompt_computed(request)
            if request.store_to_tier:
                self._remote.report_computed(sequence)
        if request.offer_id and sequence.num_computed >= request.num_offered:
            self._remote.seal_offer(sequence)
        self._state.free_next(request, sequence)

    def is_at_end(self, request: Request, num_output: int) -> bool:
        """Whether a choice with `num_output` generated tokens may have no further one."""
        return num_output > 0 and request.num_prompt + num_output >= end_of(request, self._state.limits.max_model_len)

    def _count(self, sequence: Sequence, count: int) -> None:
        sequence.num_computed += count
        kv, request = self._state.kv, sequence.request
        has_new_block = sequence.num_computed >= (sequence.num_registered + 1) * kv.block_size
        if has_new_block:
            kv.register(sequence)
            if self._remote.pushing.is_active:
                self._remote.pushing.advance(sequence)
        if request.held or not request.is_prompt_computed or request.offer_id:
            self.note_prompt(sequence)
        if has_new_block:
            # Behind the offer, which keeps what the prompt's last token reads.
            kv.drop_unneeded(sequence)
            if request.store_to_tier and kv.num_used >= self._state.limits.spill_usage * kv.num_blocks:
                self._comebacks.spill(sequence)

    def _append(self, sequence: Sequence, token_id: int, logprobs: TokenLogprobs | None) -> None:
        if sequence.doubted:
            self._confirm(sequence, token_id)
            return
        sequence.tokens.append(token_id)
        event = self._end_after(sequence, token_id)
        listed = [] if logprobs is None else [logprobs]
        if event is None:
            self._state.report(sequence, token_ids=[token_id], logprobs=listed)
            return
        is_eos = token_id in self._eos and not sequence.request.sampling.ignore_eos
        stop_token_id = token_id if event is Event.STOPPED and not is_eos else None
        self._state.finish(sequence, event, token_ids=[token_id], logprobs=listed, stop_token_id=stop_token_id)

    def _confirm(self, sequence: Sequence, token_id: int) -> None:
        """Take a token that is out already: the same, or the choice has gone on behind a wrong one and ends."""
        if (wanted := sequence.doubted.pop(0)) != token_id:
            self._state.finish(sequence, Event.FAILED, error=token_error(wanted, token_id))
            return
        # It ended nothing, or nobody would have gone on from it.
        sequence.tokens.append(token_id)

    def _end_after(self, sequence: Sequence, token_id: int) -> Event | None:
        """Return how the sequence ends with the token just appended, or None."""
        request, num_tokens = sequence.request, len(sequence.tokens)
        sampling = request.sampling
        is_long_enough = num_tokens - request.num_prompt >= sampling.min_tokens
        if is_long_enough:
            if not sampling.ignore_eos and token_id in self._eos:
                return Event.STOPPED
            if sampling.stop_token_ids and token_id in sampling.stop_token_ids:
                return Event.STOPPED
        if num_tokens >= sequence.end and self.is_at_end(request, num_tokens - request.num_prompt):
            return Event.LENGTH_REACHED
        if is_long_enough and sampling.repetition_detection is not None:
            output = sequence.tokens.view(request.num_prompt, num_tokens)
            if ends_in_repetition(output, sampling.repetition_detection):
                return Event.REPEATED
        return Event.HANDED_OFF if request.prefill_only else None

    def _fail(self, sequence: Sequence, failure: RowFailure) -> None:
        self._state.counters.nan_requests += failure.is_nan
        # The KV that led here may be as broken as the logits.
        self._state.kv.forget(sequence)
        self._remote.pushing.spoil(sequence.request.offer_id)
        error = getattr(errors, failure.code)(failure.message)
        self._state.finish(sequence, Event.FAILED, error=error)


def end_of(request: Request, max_model_len: int) -> int:
    """Return the tokens at which each choice of a request ends at the latest."""
    return min(request.num_prompt + request.sampling.max_tokens, max_model_len)
