"""Beam search for one prompt of the offline API, in its output's form."""

from pdmesh.offline.engine import OfflineEngine
from pdmesh.offline.outputs import BeamSearchOutput, BeamSearchSequence, one_position
from pdmesh.offline.runs import NO_DEADLINE_S
from pdmesh.offline.sampling_params import BeamSearchParams
from pdmesh.openai.generator import TokenRequest
from pdmesh.openai.intake.prompts import Prompt, resolve_max_tokens
from pdmesh.openai.intake.size import check_size
from pdmesh.openai.run.beam import Beam, BeamOptions, run_beam_search
from pdmesh.openai.run.logprobs import LogprobSpeller
from pdmesh.protocol.messages import SamplingParams


async def search_beams(
    engine: OfflineEngine, request_id: str, prompt: Prompt, params: BeamSearchParams, *, cache_salt: str
) -> BeamSearchOutput:
    """Find the best beams after one prompt. Raises MeshError."""
    max_tokens = resolve_max_tokens(
        params.max_tokens, name="max_tokens", num_prompt_tokens=len(prompt.token_ids), card=engine.card
    )
    sampling = SamplingParams(n=params.beam_width, temperature=0.0, max_tokens=max_tokens)
    check_size([prompt.token_ids], sampling)
    request = TokenRequest(
        request_id=request_id,
        token_ids=prompt.token_ids,
        sampling=sampling,
        cache_salt=cache_salt,
        deadline_s=NO_DEADLINE_S,
    )
    options = BeamOptions(
        width=params.beam_width,
        max_tokens=max_tokens,
        eos_token_ids=frozenset() if params.ignore_eos else frozenset(engine.text.eos_token_ids),
        length_penalty=params.length_penalty,
        num_logprobs=2 * params.beam_width,
    )
    beams = await run_beam_search(engine.generator, request, options)
    return BeamSearchOutput(sequences=[_sequence(engine, prompt, beam, params) for beam in beams])


def _sequence(engine: OfflineEngine, prompt: Prompt, beam: Beam, params: BeamSearchParams) -> BeamSearchSequence:
    speller = LogprobSpeller(engine.text, prompt.token_ids, as_token_ids=False)
    tokens = [*prompt.token_ids, *beam.token_ids]
    ended = beam.finish_reason == "stop"
    shown = tokens[:-1] if ended and not params.include_stop_str_in_output else tokens
    return BeamSearchSequence(
        tokens=tokens,
        text=engine.text.decode(shown, params.skip_special_tokens),
        cum_logprob=beam.cum_logprob,
        logprobs=[one_position(speller.spell(position)) for position in beam.logprobs],
        finish_reason=beam.finish_reason,
        stop_reason=beam.token_ids[-1] if ended else None,
    )
