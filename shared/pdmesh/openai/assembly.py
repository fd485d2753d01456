"""Puts a job together from what the endpoints found out: names, salts, token requests, the run, the answer's head."""

import asyncio
import hashlib
import time
import uuid
from dataclasses import dataclass
from enum import Enum

import pdmesh
from pdmesh.errors import InvalidRequest
from pdmesh.openai.answer.base import Answer, AnswerHead
from pdmesh.openai.generator import Generator, ModelCard, TokenRequest
from pdmesh.openai.intake.identity import Caller, SaltFunction, check_request_id, check_salt
from pdmesh.openai.intake.prompts import Prompt
from pdmesh.openai.intake.sampling import check_int64
from pdmesh.openai.intake.size import check_size
from pdmesh.openai.job import Job
from pdmesh.openai.metrics import ApiMetrics
from pdmesh.openai.run.answer import AnswerRun
from pdmesh.openai.run.beam_answer import BeamRun
from pdmesh.openai.run.choice import TextOptions
from pdmesh.openai.schemas import GenerationBody
from pdmesh.openai.text import StopStrings, TextModel
from pdmesh.protocol.messages import SamplingParams


class Kind(Enum):
    """Which answer, and how its ids begin."""

    COMPLETION = "cmpl"
    CHAT = "chatcmpl"


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """What both endpoints have found out before their ways join."""

    kind: Kind
    body: GenerationBody
    caller: Caller
    card: ModelCard
    prompts: list[Prompt]
    sampling: list[SamplingParams]
    logprobs: bool


class Assembler:
    """Makes runs, heads and jobs."""

    def __init__(self, *, generator: Generator, text: TextModel, metrics: ApiMetrics, salt_for: SaltFunction) -> None:
        self._generator = generator
        self._text = text
        self._metrics = metrics
        self._salt_for = salt_for

    def run(self, asked: Asked, deadline: float) -> AnswerRun:
        """Make the token requests, with what is left until `deadline` (event loop clock). Raises InvalidRequest."""
        body = asked.body
        check_size([prompt.token_ids for prompt in asked.prompts], asked.sampling[0])
        if body.kv_transfer_params is not None and len(asked.prompts) > 1:
            raise InvalidRequest("kv_transfer_params needs a single prompt", param="kv_transfer_params")
        salt = self._salt_for(asked.caller.api_key, check_salt(body.cache_salt))
        priority = check_int64("priority", body.priority)
        if asked.caller.priority is not None:
            priority = asked.caller.priority
        remaining_s = max(0.0, deadline - asyncio.get_running_loop().time())
        requests = [
            TokenRequest(
                request_id=_internal_id(self._public_id(asked), number if asked.kind is Kind.COMPLETION else None),
                token_ids=prompt.token_ids,
                sampling=sampling,
                cache_salt=salt,
                priority=priority,
                deadline_s=remaining_s,
                kv_transfer_params=body.kv_transfer_params,
            )
            for number, (prompt, sampling) in enumerate(zip(asked.prompts, asked.sampling, strict=True))
        ]
        options = TextOptions(
            stops=StopStrings(body.stops),
            include_stop=bool(body.include_stop_str_in_output),
            skip_special_tokens=body.skip_special_tokens is not False,
            logprobs=asked.logprobs,
            tokens_as_ids=bool(body.return_tokens_as_token_ids),
        )
        if body.use_beam_search:
            return BeamRun(
                generator=self._generator,
                text=self._text,
                prompts=asked.prompts,
                requests=requests,
                options=options,
                length_penalty=1.0 if body.length_penalty is None else body.length_penalty,
            )
        return AnswerRun(
            generator=self._generator, text=self._text, prompts=asked.prompts, requests=requests, options=options
        )

    def job(self, answer: Answer, deadline: float) -> Job:
        """Take the job into the count of those in flight; it ends with `Job.ended`."""
        self._metrics.begin()
        return Job(answer=answer, generator=self._generator, deadline=deadline, on_end=self._metrics.end)

    def head(self, asked: Asked) -> AnswerHead:
        """Name the answer; the fingerprint changes with the served model and this version."""
        known = f"{asked.card.root}\0{asked.card.max_model_len}\0{asked.card.created_s}"
        return AnswerHead(
            id=self._public_id(asked),
            created=int(time.time()),
            model=asked.body.model or asked.card.name,
            fingerprint=f"pdmesh-{pdmesh.__version__}-{hashlib.sha256(known.encode()).hexdigest()[:8]}",
        )

    def _public_id(self, asked: Asked) -> str:
        """X-Request-Id wins over the body's request_id, as in vLLM."""
        own = None if asked.caller.has_own_id else check_request_id(asked.body.request_id)
        return f"{asked.kind.value}-{own or asked.caller.request_id}"


def _internal_id(public_id: str, number: int | None) -> str:
    """Two requests may carry the same id; inside the mesh they are told apart by a random suffix."""
    middle = "" if number is None else f"-{number}"
    return f"{public_id}{middle}-{uuid.uuid4().hex[:8]}"
