"""Turns checked bodies into jobs: render, tokenise, fit, resolve sampling, name the request. The heart of the API layer."""

import asyncio
import hashlib
import logging
import time
import uuid
from collections.abc import Awaitable
from dataclasses import dataclass
from enum import Enum
from typing import Any, Literal

import pdmesh
from pdmesh.config import HttpConfig
from pdmesh.errors import DeadlineExceeded, InvalidRequest, NotFound
from pdmesh.openai.answer.base import Answer, AnswerHead
from pdmesh.openai.answer.chat import ChatAnswer
from pdmesh.openai.answer.completion import CompletionAnswer
from pdmesh.openai.generator import Generator, ModelCard, TokenRequest
from pdmesh.openai.intake.identity import Caller, SaltFunction, check_salt
from pdmesh.openai.intake.messages import check_messages, check_template_options, check_tools
from pdmesh.openai.intake.prompts import Prompt, encode_text, fit_prompt, resolve_max_tokens, split_prompts
from pdmesh.openai.intake.sampling import MAX_CHOICES, Limits, check_int64, resolve_sampling
from pdmesh.openai.job import Job
from pdmesh.openai.metrics import ApiMetrics
from pdmesh.openai.run.answer import AnswerRun
from pdmesh.openai.run.choice import TextOptions
from pdmesh.openai.schemas import ChatBody, CompletionBody, GenerationBody, TokenizeBody
from pdmesh.openai.schemas.unsupported import REFUSED, refuse_unsupported
from pdmesh.openai.text import TextModel
from pdmesh.protocol.messages import SamplingParams

log = logging.getLogger(__name__)

Role = Literal["proxy", "engine"]
# A thread cannot be stopped; the template's own bounds end it, this only frees the request.
RENDER_TIMEOUT_S = 15.0


class Kind(Enum):
    """Which answer, and how its ids begin."""

    COMPLETION = "cmpl"
    CHAT = "chatcmpl"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Asked:
    """What both endpoints have found out before their ways join."""

    kind: Kind
    body: GenerationBody
    caller: Caller
    card: ModelCard
    prompts: list[Prompt]
    sampling: list[SamplingParams]
    logprobs: bool


class Serving:
    """Makes jobs for one generator and one text model."""

    def __init__(
        self,
        *,
        generator: Generator,
        text: TextModel,
        config: HttpConfig,
        role: Role,
        metrics: ApiMetrics,
        salt_for: SaltFunction,
    ) -> None:
        self.generator = generator
        self.text = text
        self.metrics = metrics
        self._config = config
        self._role = role
        self._salt_for = salt_for

    async def completion(self, body: CompletionBody, raw: dict[str, Any], caller: Caller) -> Job:
        """Accept a completion request. Raises MeshError."""
        deadline = self._deadline()
        self._check_fields(body, raw)
        card = await self.card_for(body.model)
        requested = 16 if body.max_tokens is None else body.max_tokens
        prompts = [await self._completion_prompt(item, body, card, requested) for item in split_prompts(body.prompt)]
        prompt_logprobs = body.logprobs if body.echo and body.prompt_logprobs is None else body.prompt_logprobs
        sampling = [
            resolve_sampling(
                body,
                text=self.text,
                limits=self._limits(card),
                max_tokens=resolve_max_tokens(
                    requested,
                    name="max_tokens",
                    num_prompt_tokens=len(prompt.token_ids),
                    card=card,
                    zero_allowed=bool(body.echo),
                ),
                requested=requested,
                logprobs=body.logprobs,
                prompt_logprobs=prompt_logprobs,
            )
            for prompt in prompts
        ]
        asked = _Asked(
            kind=Kind.COMPLETION,
            body=body,
            caller=caller,
            card=card,
            prompts=prompts,
            sampling=sampling,
            logprobs=body.logprobs is not None,
        )
        run = self._run(asked, deadline)
        return self._job(CompletionAnswer(self._head(asked), body, run, self.text), deadline)

    async def chat(self, body: ChatBody, raw: dict[str, Any], caller: Caller) -> Job:
        """Accept a chat request. Raises MeshError."""
        deadline = self._deadline()
        self._check_fields(body, raw)
        check_tools(body)
        messages = check_messages(body.messages)
        check_template_options(body)
        logprobs = _chat_logprobs(body)
        card = await self.card_for(body.model)
        name = "max_tokens" if body.max_completion_tokens is None else "max_completion_tokens"
        requested = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
        rendered = await self._render(body, messages, effort=body.reasoning_effort, documents=body.documents)
        token_ids = await self._encode(rendered, body, card, bool(body.add_special_tokens), "messages")
        prompt = Prompt(token_ids=fit_prompt(token_ids, body, card, requested), text=rendered)
        max_tokens = resolve_max_tokens(requested, name=name, num_prompt_tokens=len(prompt.token_ids), card=card)
        sampling = resolve_sampling(
            body,
            text=self.text,
            limits=self._limits(card),
            max_tokens=max_tokens,
            requested=requested,
            logprobs=logprobs,
            prompt_logprobs=body.prompt_logprobs,
        )
        asked = _Asked(
            kind=Kind.CHAT,
            body=body,
            caller=caller,
            card=card,
            prompts=[prompt],
            sampling=[sampling],
            logprobs=logprobs is not None,
        )
        run = self._run(asked, deadline)
        last = messages[-1]
        role = "assistant" if body.add_generation_prompt else last["role"]
        opening = _text_of(last) if body.echo and last["role"] == role else ""
        answer = ChatAnswer(self._head(asked), body, run, self.text, role=role, opening=opening)
        return self._job(answer, deadline)

    async def tokenize(self, body: TokenizeBody) -> tuple[list[int], ModelCard]:
        """Return the ids that a completion or chat request with the same fields would start from."""
        card = await self.card_for(body.model)
        if (body.prompt is None) == (body.messages is None):
            raise InvalidRequest("exactly one of prompt and messages is required", param="prompt")
        if body.prompt is not None:
            special = body.add_special_tokens is not False
            return await encode_text(
                body.prompt, text=self.text, card=card, add_special_tokens=special, param="prompt", bounded=False
            ), card
        check_template_options(body)
        rendered = await self._render(body, check_messages(body.messages or []))
        special = bool(body.add_special_tokens)
        return await encode_text(
            rendered, text=self.text, card=card, add_special_tokens=special, param="messages", bounded=False
        ), card

    async def card_for(self, model: str | None) -> ModelCard:
        """Return the served model's card if that is the model meant. Raises NotFound, PeerUnavailable."""
        card = await self.generator.card()
        names = [card.name, *card.aliases]
        if model and model not in names:
            raise NotFound(
                f"The model `{model[:200]}` does not exist. Valid aliases: {', '.join(names)}.", param="model"
            )
        return card

    def _deadline(self) -> float:
        return asyncio.get_running_loop().time() + self._config.request_timeout_s

    def _limits(self, card: ModelCard) -> Limits:
        return Limits(card=card, max_logprobs=self._config.max_logprobs)

    def _check_fields(self, body: GenerationBody, raw: dict[str, Any]) -> None:
        """Everything that can be refused before the prompt is looked at."""
        refuse_unsupported(raw)
        if body.kv_transfer_params is not None and self._role == "proxy":
            raise InvalidRequest("kv_transfer_params is never accepted from clients", param="kv_transfer_params")
        if body.stream_options is not None and not body.stream:
            raise InvalidRequest("Stream options can only be defined when `stream=True`.", param="stream_options")
        if body.prompt_logprobs is not None and body.stream:
            raise InvalidRequest("`prompt_logprobs` are not available when `stream=True`.", param="prompt_logprobs")
        unknown = [name for name in body.unknown_fields if name not in REFUSED]
        if unknown:
            self.metrics.unknown_fields.inc(len(unknown))
            log.debug("ignored unknown fields: %s", ", ".join(name[:40] for name in unknown[:20]))

    async def _completion_prompt(
        self, item: str | list[int], body: CompletionBody, card: ModelCard, requested: int
    ) -> Prompt:
        if isinstance(item, str):
            token_ids = await self._encode(item, body, card, body.add_special_tokens is not False, "prompt")
        else:
            token_ids = item
        fitted = fit_prompt(token_ids, body, card, requested)
        return Prompt(token_ids=fitted, text=item if isinstance(item, str) and fitted is token_ids else None)

    async def _encode(
        self, value: str, body: GenerationBody, card: ModelCard, add_special_tokens: bool, param: str
    ) -> list[int]:
        return await encode_text(
            value,
            text=self.text,
            card=card,
            add_special_tokens=add_special_tokens,
            param=param,
            bounded=body.truncate_prompt_tokens is None,
        )

    async def _render(
        self,
        body: ChatBody | TokenizeBody,
        messages: list[dict[str, Any]],
        *,
        effort: str | None = None,
        documents: list[dict[str, Any]] | None = None,
    ) -> str:
        variables = dict(body.chat_template_kwargs or {})
        if effort is not None:
            variables["reasoning_effort"] = effort
        return await _within(
            RENDER_TIMEOUT_S,
            asyncio.to_thread(
                self.text.render_chat,
                messages,
                add_generation_prompt=bool(body.add_generation_prompt),
                continue_final_message=bool(body.continue_final_message),
                tools=body.tools,
                documents=documents,
                variables=variables,
            ),
        )

    def _run(self, asked: _Asked, deadline: float) -> AnswerRun:
        body = asked.body
        if len(asked.prompts) * asked.sampling[0].n > MAX_CHOICES:
            raise InvalidRequest(f"at most {MAX_CHOICES} choices over all prompts", param="n")
        if body.kv_transfer_params is not None and len(asked.prompts) > 1:
            raise InvalidRequest("kv_transfer_params needs a single prompt", param="kv_transfer_params")
        salt = self._salt_for(asked.caller.api_key, check_salt(body.cache_salt))
        priority = (
            asked.caller.priority if asked.caller.priority is not None else check_int64("priority", body.priority)
        )
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
            stops=body.stops,
            include_stop=bool(body.include_stop_str_in_output),
            skip_special_tokens=body.skip_special_tokens is not False,
            logprobs=asked.logprobs,
            tokens_as_ids=bool(body.return_tokens_as_token_ids),
        )
        return AnswerRun(
            generator=self.generator, text=self.text, prompts=asked.prompts, requests=requests, options=options
        )

    def _job(self, answer: Answer, deadline: float) -> Job:
        self.metrics.begin()
        return Job(answer=answer, generator=self.generator, deadline=deadline, on_end=self.metrics.end)

    def _head(self, asked: _Asked) -> AnswerHead:
        known = f"{asked.card.root}\0{asked.card.max_model_len}\0{asked.card.created_s}"
        return AnswerHead(
            id=self._public_id(asked),
            created=int(time.time()),
            model=asked.body.model or asked.card.name,
            fingerprint=f"pdmesh-{pdmesh.__version__}-{hashlib.sha256(known.encode()).hexdigest()[:8]}",
        )

    def _public_id(self, asked: _Asked) -> str:
        """X-Request-Id wins over the body's request_id, as in vLLM."""
        own = None if asked.caller.has_own_id else asked.body.request_id
        return f"{asked.kind.value}-{own or asked.caller.request_id}"


async def _within(timeout_s: float, rendering: Awaitable[str]) -> str:
    try:
        async with asyncio.timeout(timeout_s):
            return await rendering
    except TimeoutError:
        raise DeadlineExceeded(f"the chat template took over {timeout_s:g} s") from None


def _internal_id(public_id: str, number: int | None) -> str:
    """Two requests may carry the same id; inside the mesh they are told apart by a random suffix."""
    middle = "" if number is None else f"-{number}"
    return f"{public_id}{middle}-{uuid.uuid4().hex[:8]}"


def _chat_logprobs(body: ChatBody) -> int | None:
    if body.top_logprobs is not None and not body.logprobs:
        raise InvalidRequest("when using `top_logprobs`, `logprobs` must be set to true.", param="top_logprobs")
    return (body.top_logprobs or 0) if body.logprobs else None


def _text_of(message: dict[str, Any]) -> str:
    content = message["content"]
    return "\n".join(part["text"] for part in content) if isinstance(content, list) else content or ""
