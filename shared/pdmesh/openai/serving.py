"""Turns checked bodies into jobs: render, tokenise, fit, resolve sampling, name the request. The heart of the API layer."""

import asyncio
import logging
from collections.abc import Awaitable, Iterator
from contextlib import contextmanager
from typing import Any, Literal

from pdmesh.config import HttpConfig
from pdmesh.errors import DeadlineExceeded, InvalidRequest, MeshError, NotFound
from pdmesh.openai.answer.chat import ChatAnswer
from pdmesh.openai.answer.completion import CompletionAnswer
from pdmesh.openai.assembly import Asked, Assembler, Kind
from pdmesh.openai.generator import Generator, ModelCard
from pdmesh.openai.intake.beam import check_beam_fields, resolve_beam
from pdmesh.openai.intake.identity import Caller, SaltFunction
from pdmesh.openai.intake.messages import check_messages, check_template_options, check_tools
from pdmesh.openai.intake.prompts import Prompt, encode_texts, fit_prompt, resolve_max_tokens, split_prompts
from pdmesh.openai.intake.sampling import Limits, for_prompt, resolve_sampling
from pdmesh.openai.intake.thinking import thinking_tokens
from pdmesh.openai.job import Job
from pdmesh.openai.metrics import ApiMetrics
from pdmesh.openai.schemas import ChatBody, CompletionBody, GenerationBody, TokenizeBody
from pdmesh.openai.schemas.unsupported import REFUSED, refuse_unsupported
from pdmesh.openai.text import TextModel
from pdmesh.protocol.messages import SamplingParams

log = logging.getLogger(__name__)

Role = Literal["proxy", "engine"]
DEFAULT_MAX_TOKENS = 16
# A thread cannot be stopped; the template's own bounds end it, this only frees the request.
RENDER_TIMEOUT_S = 15.0


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
        self._thinking = thinking_tokens(config, text)
        self._assembler = Assembler(generator=generator, text=text, metrics=metrics, salt_for=salt_for)

    async def completion(self, body: CompletionBody, raw: dict[str, Any], caller: Caller) -> Job:
        """Accept a completion request. Raises MeshError."""
        with self._telling(body):
            return await self._completion(body, raw, caller)

    async def _completion(self, body: CompletionBody, raw: dict[str, Any], caller: Caller) -> Job:
        deadline = self._deadline()
        self._check_fields(body, raw)
        card = await self.card_for(body.model)
        requested = DEFAULT_MAX_TOKENS if body.max_tokens is None else body.max_tokens
        prompts = await self._completion_prompts(body, card, requested)
        fitted = [
            resolve_max_tokens(
                requested,
                name="max_tokens",
                num_prompt_tokens=len(prompt.token_ids),
                card=card,
                zero_allowed=bool(body.echo) and not body.use_beam_search,
            )
            for prompt in prompts
        ]
        sampling = self._sampling(
            body,
            card,
            max_tokens=requested,
            logprobs=body.logprobs,
            prompt_logprobs=body.logprobs if body.echo and body.prompt_logprobs is None else body.prompt_logprobs,
        )
        asked = Asked(
            kind=Kind.COMPLETION,
            body=body,
            caller=caller,
            card=card,
            prompts=prompts,
            sampling=[for_prompt(sampling, body, max_tokens) for max_tokens in fitted],
            logprobs=body.logprobs is not None,
        )
        run = self._assembler.run(asked, deadline)
        return self._assembler.job(CompletionAnswer(self._assembler.head(asked), body, run, self.text), deadline)

    async def chat(self, body: ChatBody, raw: dict[str, Any], caller: Caller) -> Job:
        """Accept a chat request. Raises MeshError."""
        with self._telling(body):
            return await self._chat(body, raw, caller)

    async def _chat(self, body: ChatBody, raw: dict[str, Any], caller: Caller) -> Job:
        deadline = self._deadline()
        self._check_fields(body, raw)
        check_tools(body)
        messages = check_messages(body.messages)
        check_template_options(body)
        logprobs = _chat_logprobs(body)
        card = await self.card_for(body.model)
        name = "max_tokens" if body.max_completion_tokens is None else "max_completion_tokens"
        requested = _requested(body)
        prompt = await self._chat_prompt(body, messages, card, requested)
        max_tokens = resolve_max_tokens(requested, name=name, num_prompt_tokens=len(prompt.token_ids), card=card)
        sampling = self._sampling(
            body,
            card,
            max_tokens=max_tokens if requested is None else requested,
            logprobs=logprobs,
            prompt_logprobs=body.prompt_logprobs,
        )
        asked = Asked(
            kind=Kind.CHAT,
            body=body,
            caller=caller,
            card=card,
            prompts=[prompt],
            sampling=[for_prompt(sampling, body, max_tokens)],
            logprobs=logprobs is not None,
        )
        run = self._assembler.run(asked, deadline)
        last = messages[-1]
        role = "assistant" if body.add_generation_prompt else last["role"]
        opening = _text_of(last) if body.echo and last["role"] == role else ""
        answer = ChatAnswer(self._assembler.head(asked), body, run, self.text, role=role, opening=opening)
        return self._assembler.job(answer, deadline)

    async def render_completion(self, body: CompletionBody, raw: dict[str, Any]) -> list[list[int]]:
        """Return the ids of each prompt that `completion` would run. Raises MeshError."""
        self._check_fields(body, raw)
        requested = DEFAULT_MAX_TOKENS if body.max_tokens is None else body.max_tokens
        prompts = await self._completion_prompts(body, await self.card_for(body.model), requested)
        return [prompt.token_ids for prompt in prompts]

    async def render_chat(self, body: ChatBody, raw: dict[str, Any]) -> list[int]:
        """Return the ids of the prompt that `chat` would run. Raises MeshError."""
        self._check_fields(body, raw)
        check_tools(body)
        messages = check_messages(body.messages)
        check_template_options(body)
        card = await self.card_for(body.model)
        return (await self._chat_prompt(body, messages, card, _requested(body))).token_ids

    async def tokenize(self, body: TokenizeBody) -> tuple[list[int], ModelCard]:
        """Return the ids that a completion or chat request with the same fields would start from."""
        card = await self.card_for(body.model)
        if (body.prompt is None) == (body.messages is None):
            raise InvalidRequest("exactly one of prompt and messages is required", param="prompt")
        if body.prompt is not None:
            value, special = body.prompt, body.add_special_tokens is not False
        else:
            check_template_options(body)
            value = await self._render(body, check_messages(body.messages or []))
            special = bool(body.add_special_tokens)
        [ids] = await encode_texts(
            [value], text=self.text, card=card, add_special_tokens=special, param="prompt", bounded=False
        )
        return ids, card

    async def card_for(self, model: str | None) -> ModelCard:
        """Return the served model's card if that is the model meant. Raises NotFound, PeerUnavailable."""
        card = await self.generator.card()
        names = [card.name, *card.aliases]
        if model and model not in names:
            raise NotFound(
                f"The model `{model[:200]}` does not exist. Valid aliases: {', '.join(names)}.", param="model"
            )
        return card

    @contextmanager
    def _telling(self, body: GenerationBody) -> Iterator[None]:
        """Tell the generator of a refused request's parameters: another engine keeps KV for it."""
        try:
            yield
        except BaseException as exc:
            # What may be tried again, at another decode, still needs its KV.
            is_final = not (isinstance(exc, MeshError) and exc.retryable)
            if body.kv_transfer_params is not None and is_final:
                self.generator.refused(body.kv_transfer_params)
            raise

    def _deadline(self) -> float:
        return asyncio.get_running_loop().time() + self._config.request_timeout_s

    def _sampling(
        self,
        body: GenerationBody,
        card: ModelCard,
        *,
        max_tokens: int,
        logprobs: int | None,
        prompt_logprobs: int | None,
    ) -> SamplingParams:
        resolve = resolve_beam if body.use_beam_search else resolve_sampling
        return resolve(
            body,
            text=self.text,
            limits=Limits(card=card, max_logprobs=self._config.max_logprobs, thinking=self._thinking),
            max_tokens=max_tokens,
            logprobs=logprobs,
            prompt_logprobs=prompt_logprobs,
        )

    def _check_fields(self, body: GenerationBody, raw: dict[str, Any]) -> None:
        """Everything that can be refused before the prompt is looked at."""
        refuse_unsupported(raw)
        check_beam_fields(body)
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

    async def _completion_prompts(self, body: CompletionBody, card: ModelCard, requested: int) -> list[Prompt]:
        given = split_prompts(body.prompt)
        texts = [item for item in given if isinstance(item, str)]
        ids = [item for item in given if not isinstance(item, str)]
        if texts:
            ids = await self._encode(texts, body, card, body.add_special_tokens is not False, "prompt")
        fitted = [fit_prompt(token_ids, body, card, requested) for token_ids in ids]
        return [
            # A prompt that was cut is shown as what is left of it.
            Prompt(token_ids=kept, text=texts[number] if texts and kept is ids[number] else None)
            for number, kept in enumerate(fitted)
        ]

    async def _chat_prompt(
        self, body: ChatBody, messages: list[dict[str, Any]], card: ModelCard, requested: int | None
    ) -> Prompt:
        rendered = await self._render(body, messages, effort=body.reasoning_effort, documents=body.documents)
        [token_ids] = await self._encode([rendered], body, card, bool(body.add_special_tokens), "messages")
        return Prompt(token_ids=fit_prompt(token_ids, body, card, requested), text=rendered)

    async def _encode(
        self, values: list[str], body: GenerationBody, card: ModelCard, add_special_tokens: bool, param: str
    ) -> list[list[int]]:
        return await encode_texts(
            values,
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


async def _within(timeout_s: float, rendering: Awaitable[str]) -> str:
    try:
        async with asyncio.timeout(timeout_s):
            return await rendering
    except TimeoutError:
        raise DeadlineExceeded(f"the chat template took over {timeout_s:g} s") from None


def _requested(body: ChatBody) -> int | None:
    return body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens


def _chat_logprobs(body: ChatBody) -> int | None:
    if body.top_logprobs is not None and not body.logprobs:
        raise InvalidRequest("when using `top_logprobs`, `logprobs` must be set to true.", param="top_logprobs")
    return (body.top_logprobs or 0) if body.logprobs else None


def _text_of(message: dict[str, Any]) -> str:
    content = message["content"]
    return "\n".join(part["text"] for part in content) if isinstance(content, list) else content or ""
