"""Beam search over any Generator: each step asks for one token after every live beam, and prefix caching finds the rest.

The definition is vLLM's: every live beam proposes its 2 × width most likely tokens; an end-of-text token completes a beam
at once, of the others the best `width` live on; completed and live beams compete by score at the end. The score is the sum
of log-probabilities divided by (prompt + generated tokens, the one that ended it not counted) ** length_penalty. What is
different changes no result: the search ends when no live beam can still beat the completed ones, and ties have an order.
"""

import asyncio
import heapq
import math
from collections.abc import Iterable
from dataclasses import dataclass, field

from pdmesh.errors import InternalError, from_code
from pdmesh.openai.generator import BEAM_SEARCH, DIRECT, Generator, TokenRequest, Trace
from pdmesh.openai.run.merge import merged
from pdmesh.protocol.messages import ChoiceDelta, SamplingParams, TokenLogprobs


@dataclass(frozen=True, slots=True, kw_only=True)
class BeamOptions:
    """What a search is to do, checked."""

    width: int
    max_tokens: int
    """Per beam, ≥ 1."""
    eos_token_ids: frozenset[int]
    """Tokens that complete a beam; empty with ignore_eos."""
    length_penalty: float = 1.0
    num_logprobs: int | None = None
    """Alternatives to keep for each token; None: no log-probabilities."""

    @property
    def num_proposed(self) -> int:
        return 2 * self.width


@dataclass(frozen=True, slots=True, kw_only=True)
class Beam:
    """One hypothesis: what follows the prompt, and how likely it is."""

    token_ids: list[int]
    """Generated tokens, with the one that completed it."""
    cum_logprob: float
    logprobs: list[TokenLogprobs]
    """One per token when asked for."""
    finish_reason: str = ""
    """"" while it lives; else stop or length."""


class BeamSearch:
    """The state of one search, without I/O: ask for a token after each of `live`, then `advance`, until `done`."""

    def __init__(self, num_prompt_tokens: int, options: BeamOptions) -> None:
        self._num_prompt_tokens = num_prompt_tokens
        self._options = options
        self._completed: list[Beam] = []
        self.live = [Beam(token_ids=[], cum_logprob=0.0, logprobs=[])]
        self._num_steps = 0

    @property
    def done(self) -> bool:
        return self._num_steps >= self._options.max_tokens or not self.live or self._is_decided()

    def advance(self, positions: list[TokenLogprobs]) -> None:
        """Take the log-probabilities after each live beam, in their order. Raises InternalError for NaN."""
        self._num_steps += 1
        proposed = [
            beam
            for parent, position in zip(self.live, positions, strict=True)
            for beam in self._after(parent, position)
        ]
        ended = [beam for beam in proposed if beam.finish_reason]
        self._completed = self._best([*self._completed, *ended])
        self.live = self._best(beam for beam in proposed if not beam.finish_reason)

    def results(self) -> list[Beam]:
        """Return the best beams, at most `width` (fewer when the vocabulary has no more), best first."""
        cut = [
            Beam(token_ids=beam.token_ids, cum_logprob=beam.cum_logprob, logprobs=beam.logprobs, finish_reason="length")
            for beam in self.live
        ]
        return self._best([*self._completed, *cut])

    def _after(self, parent: Beam, position: TokenLogprobs) -> Iterable[Beam]:
        # The first entry is the token that was drawn, which is among the most likely ones as well.
        proposals = list(zip(position.token_ids[1:], position.logprobs[1:], strict=True))
        for rank, (token_id, logprob) in enumerate(proposals[: self._options.num_proposed], start=1):
            if math.isnan(logprob):
                raise InternalError("the model produced NaN log-probabilities for this request")
            if logprob == -math.inf:
                continue
            yield Beam(
                token_ids=[*parent.token_ids, token_id],
                cum_logprob=parent.cum_logprob + logprob,
                logprobs=[*parent.logprobs, *self._kept(position, token_id, logprob, rank)],
                finish_reason="stop" if token_id in self._options.eos_token_ids else "",
            )

    def _kept(self, position: TokenLogprobs, token_id: int, logprob: float, rank: int) -> list[TokenLogprobs]:
        num_kept = self._options.num_logprobs
        if num_kept is None:
            return []
        others = slice(1, 1 + num_kept)
        return [
            TokenLogprobs(
                token_ids=[token_id, *position.token_ids[others]],
                logprobs=[logprob, *position.logprobs[others]],
                rank=rank,
            )
        ]

    def _best(self, beams: Iterable[Beam]) -> list[Beam]:
        """The order does not depend on the order of `beams`: of equal scores the smaller token ids come first."""
        return heapq.nsmallest(self._options.width, beams, key=lambda beam: (-self._score(beam), beam.token_ids))

    def _score(self, beam: Beam) -> float:
        num_generated = len(beam.token_ids) - (beam.finish_reason == "stop")
        return self._penalised(beam.cum_logprob, num_generated)

    def _penalised(self, cum_logprob: float, num_generated: int) -> float:
        return float(cum_logprob / (self._num_prompt_tokens + num_generated) ** self._options.length_penalty)

    def _is_decided(self) -> bool:
        """Whether the worst of enough completed beams beats what the best live one can still become."""
        if len(self._completed) < self._options.width:
            return False
        # Sums only fall, and the penalty moves one way with the length, so the two ends bound all that is between.
        best = max(beam.cum_logprob for beam in self.live)
        reachable = max(self._penalised(best, num) for num in (self._num_steps, self._options.max_tokens))
        return self._score(self._completed[-1]) > reachable


@dataclass(slots=True)
class _Answers:
    """What one step has brought so far, by beam."""

    positions: list[TokenLogprobs | None]
    cached_tokens: list[int] = field(default_factory=list)


async def run_beam_search(generator: Generator, request: TokenRequest, options: BeamOptions) -> list[Beam]:
    """Search after one prompt; `request` gives ids, salt, priority and deadline, and its trace is filled in.

    Cancelling it aborts what runs. Raises MeshError when any step fails.
    """
    loop = asyncio.get_running_loop()
    deadline = loop.time() + request.deadline_s
    search = BeamSearch(len(request.token_ids), options)
    sampling = SamplingParams(
        temperature=0.0,
        max_tokens=1,
        # EOS is for the search to judge, not for the engine.
        ignore_eos=True,
        logprobs=max(options.num_proposed, options.num_logprobs or 0),
    )
    num_steps = 0
    while not search.done:
        steps = [
            TokenRequest(
                request_id=f"{request.request_id}-{num_steps}-{number}",
                token_ids=[*request.token_ids, *beam.token_ids],
                sampling=sampling,
                cache_salt=request.cache_salt,
                priority=request.priority,
                deadline_s=max(0.0, deadline - loop.time()),
                beam_search=True,
                preferred_engine=request.trace.decode,
                model_fingerprint=request.trace.model_fingerprint,
            )
            for number, beam in enumerate(search.live)
        ]
        answers = await _ask(generator, steps)
        _merge_traces(request.trace, [step.trace for step in steps])
        if num_steps == 0:
            request.trace.cached_tokens = max(answers.cached_tokens, default=0)
        search.advance([_known(position) for position in answers.positions])
        num_steps += 1
    return search.results()


async def _ask(generator: Generator, steps: list[TokenRequest]) -> _Answers:
    answers = _Answers([None] * len(steps))
    async with merged(generator, steps) as deltas:
        async for index, delta in deltas:
            _check(delta, steps[index])
            answers.cached_tokens.append(delta.cached_tokens)
            if delta.logprobs:
                answers.positions[index] = delta.logprobs[0]
    return answers


def _check(delta: ChoiceDelta, step: TokenRequest) -> None:
    if delta.finish_reason in ("error", "abort"):
        code, message = delta.error_code or "InternalError", delta.error_message or "the engine gave up a beam"
        raise from_code(code, message, delta.error_param or None, step.request_id)


def _known(position: TokenLogprobs | None) -> TokenLogprobs:
    if position is None:
        raise InternalError("the engine ended a step of a beam search without log-probabilities")
    return position


def _merge_traces(whole: Trace, steps: list[Trace]) -> None:
    """The search's trace tells where its last step ran and, once, everything that was not as intended."""
    for trace in steps:
        whole.prefill, whole.decode = trace.prefill or whole.prefill, trace.decode or whole.decode
        whole.model_fingerprint = trace.model_fingerprint or whole.model_fingerprint
        if not whole.reason or trace.reason not in (DIRECT, BEAM_SEARCH):
            whole.reason = BEAM_SEARCH if trace.reason in ("", DIRECT) else trace.reason
        whole.kv_source = whole.kv_source or trace.kv_source
        whole.kv_bytes += trace.kv_bytes
        whole.fallbacks += [fallback for fallback in trace.fallbacks if fallback not in whole.fallbacks]
