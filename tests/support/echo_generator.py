"""A Generator without a model: says what the test tells it to, in real time, and remembers what it was asked."""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

from pdmesh.errors import MeshError
from pdmesh.openai.generator import Generator, ModelCard, TokenRequest
from pdmesh.protocol.messages import ChoiceDelta, TokenLogprobs


@dataclass(kw_only=True)
class EchoGenerator(Generator):
    """Every choice says `reply`, then EOS, within max_tokens; deterministic."""

    name: str = "echo"
    aliases: tuple[str, ...] = ("parrot",)
    max_model_len: int = 512
    vocab_size: int = 49152
    eos_token_id: int = 2
    reply: list[int] = field(default_factory=lambda: [504, 3575, 282, 4649])
    tokens_per_delta: int = 1
    delay_s: float = 0.0
    first_delay_s: float = 0.0
    cached_tokens: int = 0
    healthy_now: bool = True
    """False: no engine is known."""
    fail_after: int | None = None
    """Deltas of a request before `failure` is raised."""
    fail_prompt: list[int] | None = None
    """Only requests with this prompt fail; None: all."""
    failure: MeshError | Exception | None = None
    error_delta: tuple[str, str, str] | None = None
    """(code, message, param) of a last delta with finish_reason error."""
    transfer: dict[str, object] | None = None
    nan: bool = False
    requests: list[TokenRequest] = field(default_factory=list)
    aborted: list[str] = field(default_factory=list)
    """Requests whose iterator was closed before its end."""
    aborted_choices: list[tuple[str, int]] = field(default_factory=list)
    num_running: int = 0
    num_yielded: int = 0

    async def card(self) -> ModelCard:
        if self.failure is not None and self.fail_after is None:
            raise self.failure
        return ModelCard(
            name=self.name,
            root="/models/echo",
            max_model_len=self.max_model_len,
            created_s=1_700_000_000,
            vocab_size=self.vocab_size,
            aliases=self.aliases,
        )

    async def problem(self) -> str:
        return "" if self.healthy_now else "no engine"

    async def abort_choice(self, request_id: str, choice: int) -> None:
        self.aborted_choices.append((request_id, choice))

    def transfer_params(self, request_id: str) -> dict[str, object] | None:
        return self.transfer

    async def generate(self, request: TokenRequest) -> AsyncIterator[ChoiceDelta]:
        self.requests.append(request)
        request.trace.prefill, request.trace.decode, request.trace.reason = "prefill-0", "decode-0", "test"
        self.num_running += 1
        is_whole = False
        try:
            await asyncio.sleep(self.first_delay_s)
            num_sent = 0
            async for delta in self._deltas(request):
                if self._fails(request, num_sent):
                    assert self.failure is not None
                    raise self.failure
                if self._is_stopped(request, delta.choice):
                    continue
                num_sent += 1
                self.num_yielded += 1
                yield delta
            is_whole = True
        finally:
            self.num_running -= 1
            if not is_whole:
                self.aborted.append(request.request_id)

    def _fails(self, request: TokenRequest, num_sent: int) -> bool:
        is_meant = self.fail_prompt is None or request.token_ids == self.fail_prompt
        return self.fail_after is not None and num_sent >= self.fail_after and self.failure is not None and is_meant

    async def _deltas(self, request: TokenRequest) -> AsyncIterator[ChoiceDelta]:
        """Choices in turn, as an engine's steps would interleave them."""
        said = [self._said(request) for _ in range(request.sampling.n)]
        position = 0
        while any(
            position < max(len(tokens), 1) and not self._is_stopped(request, choice)
            for choice, (tokens, *_) in enumerate(said)
        ):
            if position:
                await asyncio.sleep(self.delay_s)
            for choice, (tokens, reason, stop_token_id) in enumerate(said):
                if position < max(len(tokens), 1):
                    yield self._delta(request, choice, tokens, position, reason, stop_token_id)
            position += self.tokens_per_delta
        if self.error_delta is not None:
            code, message, param = self.error_delta
            yield ChoiceDelta(
                request_id=request.request_id,
                finish_reason="error",
                error_code=code,
                error_message=message,
                error_param=param,
            )

    def _is_stopped(self, request: TokenRequest, choice: int) -> bool:
        return (request.request_id, choice) in self.aborted_choices

    def _said(self, request: TokenRequest) -> tuple[list[int], str, int | None]:
        sampling = request.sampling
        tokens = [*self.reply, self.eos_token_id]
        if sampling.allowed_token_ids:
            tokens = [sampling.allowed_token_ids[0]] * sampling.max_tokens
        if sampling.ignore_eos:
            tokens = (self.reply * (sampling.max_tokens // len(self.reply) + 1))[: sampling.max_tokens]
        for position, token_id in enumerate(tokens):
            if position + 1 > sampling.max_tokens:
                break
            if token_id in sampling.stop_token_ids:
                return tokens[: position + 1], "stop", token_id
            if token_id == self.eos_token_id and not sampling.ignore_eos:
                return tokens[: position + 1], "stop", None
        return tokens[: sampling.max_tokens], "length", None

    def _delta(
        self,
        request: TokenRequest,
        choice: int,
        tokens: list[int],
        position: int,
        reason: str,
        stop_token_id: int | None,
    ) -> ChoiceDelta:
        now = tokens[position : position + self.tokens_per_delta]
        is_last = position + self.tokens_per_delta >= len(tokens) and self.error_delta is None
        sampling = request.sampling
        prompt_logprobs: list[TokenLogprobs | None] | None = None
        if position == 0 and choice == 0 and sampling.prompt_logprobs is not None:
            rest = [self._logprobs(token_id, sampling.prompt_logprobs) for token_id in request.token_ids[1:]]
            prompt_logprobs = [None, *rest]
        return ChoiceDelta(
            request_id=request.request_id,
            choice=choice,
            token_ids=now,
            logprobs=[self._logprobs(t, sampling.logprobs) for t in now] if sampling.logprobs is not None else [],
            prompt_logprobs=prompt_logprobs,
            finish_reason=reason if is_last else "",
            stop_token_id=stop_token_id if is_last else None,
            cached_tokens=self.cached_tokens if position == 0 else 0,
            kv_bytes=1024 if position == 0 else 0,
            kv_source="shm" if position == 0 else "",
        )

    def _logprobs(self, token_id: int, num_top: int) -> TokenLogprobs:
        """The chosen token is the likeliest; the next ids follow."""
        ids = [token_id, *(((token_id + offset) % self.vocab_size) for offset in range(num_top))]
        values = [-0.5, *(-0.5 - offset for offset in range(num_top))]
        if self.nan:
            values[0] = float("nan")
        return TokenLogprobs(token_ids=ids, logprobs=values, rank=1)
