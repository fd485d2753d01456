"""The run of an answer that comes from beam search: whole beams instead of deltas, each a choice, best first."""

import asyncio
from collections.abc import AsyncGenerator

from pdmesh.openai.generator import Generator, TokenRequest
from pdmesh.openai.intake.prompts import Prompt
from pdmesh.openai.run.answer import AnswerRun
from pdmesh.openai.run.beam import Beam, BeamOptions, run_beam_search
from pdmesh.openai.run.choice import ChoiceUpdate, TextOptions
from pdmesh.openai.text import TextModel
from pdmesh.protocol.messages import ChoiceDelta


class BeamRun(AnswerRun):
    """One search per prompt, all at the same time; `sampling.n` of a request is its beam width."""

    def __init__(
        self,
        *,
        generator: Generator,
        text: TextModel,
        prompts: list[Prompt],
        requests: list[TokenRequest],
        options: TextOptions,
        length_penalty: float,
    ) -> None:
        super().__init__(generator=generator, text=text, prompts=prompts, requests=requests, options=options)
        self._eos_token_ids = frozenset(text.eos_token_ids)
        self._length_penalty = length_penalty

    async def updates(self) -> AsyncGenerator[ChoiceUpdate, None]:
        """Yield each beam once, when all searches have ended; closing it aborts what runs. Raises MeshError."""
        searches = [asyncio.create_task(self._search(run.request)) for run in self.prompts]
        try:
            found = await asyncio.gather(*searches)
        finally:
            for search in searches:
                search.cancel()
            await asyncio.gather(*searches, return_exceptions=True)
        self.num_choices = sum(map(len, found))
        for run, beams in zip(self.prompts, found, strict=True):
            run.cached_tokens = min(run.request.trace.cached_tokens, len(run.request.token_ids))
            for number, beam in enumerate(beams):
                update = run.choices[number].feed(
                    ChoiceDelta(
                        request_id=run.request.request_id,
                        choice=number,
                        token_ids=beam.token_ids,
                        logprobs=beam.logprobs,
                        finish_reason=beam.finish_reason,
                    )
                )
                self._num_completion_tokens += len(update.token_ids)
                yield update

    async def _search(self, request: TokenRequest) -> list[Beam]:
        sampling = request.sampling
        options = BeamOptions(
            width=sampling.n,
            max_tokens=sampling.max_tokens,
            eos_token_ids=frozenset() if sampling.ignore_eos else self._eos_token_ids,
            length_penalty=self._length_penalty,
            num_logprobs=sampling.logprobs,
        )
        return await run_beam_search(self._generator, request, options)
