"""`LLM`: a model in a Python program, without a server. Starts one engine core process and blocks while it works."""

import random
import weakref
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from types import TracebackType
from typing import Any, Self, TypeVar

from pdmesh.errors import InternalError, InvalidRequest, MeshError
from pdmesh.offline.background import BackgroundLoop
from pdmesh.offline.beams import search_beams
from pdmesh.offline.conversations import Conversation, read_conversations, render
from pdmesh.offline.defaults import default_sampling
from pdmesh.offline.engine import OfflineEngine, offline_engine
from pdmesh.offline.options import engine_config
from pdmesh.offline.outputs import BeamSearchOutput, PromptsFailed, RequestOutput
from pdmesh.offline.progress import ProgressBar
from pdmesh.offline.prompts import GivenPrompt, PromptType, per_prompt, read_prompts
from pdmesh.offline.runs import Runs, Work, generate
from pdmesh.offline.sampling_params import BeamSearchParams, Resolved, SamplingParams, check_integer, resolve
from pdmesh.openai.intake.prompts import Prompt
from pdmesh.openai.intake.sampling import Limits, check_int64
from pdmesh.openai.intake.thinking import thinking_tokens
from pdmesh.openai.text import TextModel

ResultT = TypeVar("ResultT", RequestOutput, BeamSearchOutput)

SEED_BITS = 63

Params = SamplingParams | Sequence[SamplingParams] | None


class LLM:
    """A model and its engine, from construction until `close` (or the end of a `with` block, or of the program).

    `options` are an engine's settings under vLLM's names (dtype, max_model_len, max_num_seqs, kv_cache_memory_bytes, …);
    None stands for the default. Calls block; they may come from any thread, from a notebook or from inside a running
    event loop. Ctrl-C aborts what a call has begun and leaves the engine usable. Raises ConfigError for options.
    """

    def __init__(self, model: str, *, seed: int | None = None, **options: Any) -> None:
        """`seed`: where seeds of prompts without one come from, so that a whole program repeats itself."""
        self.config = engine_config(model, options)
        if seed is not None:
            check_integer("seed", seed)
        self._seeds = None if seed is None else random.Random(check_int64("seed", seed))
        self._default_sampling: SamplingParams | None = None
        self._background = BackgroundLoop()
        self._closing = AsyncExitStack()
        # Holds nothing of `self`: it also runs when the last reference is gone, and at the program's end.
        self._finalizer = weakref.finalize(self, _close, self._background, self._closing)
        try:
            self._engine = self._background.run(_open(self.config, self._closing))
            self._limits = Limits(
                card=self._engine.card,
                max_logprobs=self.config.max_logprobs,
                thinking=thinking_tokens(self.config, self._engine.text),
            )
        except BaseException:
            self._finalizer()
            raise
        self._runs = Runs(self._engine)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Abort what runs and end the engine's process. Again: no effect."""
        self._finalizer()

    def get_tokenizer(self) -> TextModel:
        """Return what turns text into token ids and back: `encode`, `decode`."""
        return self._engine.text

    def get_default_sampling_params(self) -> SamplingParams:
        """Return a copy of what a call without `sampling_params` uses: the model's generation_config.json."""
        if self._default_sampling is None:
            values = default_sampling(self.config.model)
            if "max_tokens" in values:
                values["max_tokens"] = min(values["max_tokens"], self._engine.card.max_model_len)
            self._default_sampling = SamplingParams(**values)
        return self._default_sampling.clone()

    def reset_prefix_cache(self, reset_running_requests: bool = False, reset_connector: bool = False) -> bool:
        """Forget all prompts' KV, so that what comes next is computed anew; calls that run go on. Returns True, or raises.

        `reset_running_requests` changes nothing, as the blocks of running requests are no obstacle here. Raises
        InvalidRequest for `reset_connector`: offline there is no tier of KV that could be emptied.
        """
        for name, value in (("reset_running_requests", reset_running_requests), ("reset_connector", reset_connector)):
            if not isinstance(value, bool):
                raise InvalidRequest(f"{name} must be True or False, got {value!r}", param=name)
        if reset_connector:
            raise InvalidRequest("reset_connector: offline there is no KV tier to empty", param="reset_connector")
        self._check_open()
        self._background.run(self._engine.generator.reset_prefix_cache())
        return True

    def generate(
        self,
        prompts: PromptType | Sequence[PromptType],
        sampling_params: Params = None,
        *,
        use_tqdm: bool = True,
        priority: int | Sequence[int] | None = None,
    ) -> list[RequestOutput]:
        """Generate after every prompt and return the outputs in their order.

        `sampling_params` and `priority` are one for all or one per prompt; lower priority goes first, with
        scheduling_policy "priority". A prompt that fails does not stop the others: when all have ended, PromptsFailed is
        raised with what was generated, or the failure itself when there was one prompt. Raises InvalidRequest for
        parameters before anything runs.
        """
        return self._generate(read_prompts(prompts), sampling_params, use_tqdm=use_tqdm, priority=priority)

    def chat(
        self,
        messages: Conversation | Sequence[Conversation],
        sampling_params: Params = None,
        *,
        use_tqdm: bool = True,
        priority: int | Sequence[int] | None = None,
        chat_template: str | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: list[dict[str, Any]] | None = None,
        chat_template_kwargs: dict[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """Answer one conversation or several, rendered by the model's chat template or by `chat_template`; else as `generate`.

        `tools` are shown to the template; calls in an answer stay text.
        """
        if continue_final_message and add_generation_prompt:
            raise InvalidRequest(
                "continue_final_message needs add_generation_prompt=False", param="continue_final_message"
            )
        text = self._text(chat_template)
        rendered = [
            render(
                text,
                conversation,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                tools=tools,
                variables=chat_template_kwargs,
            )
            for conversation in read_conversations(messages)
        ]
        return self._generate(rendered, sampling_params, use_tqdm=use_tqdm, priority=priority)

    def beam_search(
        self,
        prompts: PromptType | Sequence[PromptType],
        params: BeamSearchParams,
        *,
        use_tqdm: bool = False,
        concurrency_limit: int | None = None,
    ) -> list[BeamSearchOutput]:
        """Find the `beam_width` best continuations of every prompt; failures as in `generate`.

        `concurrency_limit`: most prompts searched at the same time.
        """
        if concurrency_limit is not None:
            check_integer("concurrency_limit", concurrency_limit)
            if concurrency_limit < 1:
                raise InvalidRequest(
                    f"concurrency_limit must be at least 1, got {concurrency_limit}", param="concurrency_limit"
                )
        if not isinstance(params, BeamSearchParams):
            raise InvalidRequest(f"params must be BeamSearchParams, got {type(params).__name__}", param="params")

        def work(given: GivenPrompt) -> Work[BeamSearchOutput]:
            return Work(
                prompt=given,
                do=lambda request_id, prompt: search_beams(
                    self._engine, request_id, prompt, params, cache_salt=given.cache_salt
                ),
            )

        works = [work(given) for given in read_prompts(prompts)]
        with ProgressBar("Searched prompts", len(works), enabled=_flag(use_tqdm)) as bar:
            return self._run(works, lambda _: bar.advance(), limit=concurrency_limit)

    def _generate(
        self, prompts: list[GivenPrompt], params: Params, *, use_tqdm: bool, priority: int | Sequence[int] | None
    ) -> list[RequestOutput]:
        given = self.get_default_sampling_params() if params is None else params
        resolved = self._resolve(per_prompt("sampling_params", given, len(prompts)))
        priorities = per_prompt("priority", 0 if priority is None else priority, len(prompts))

        def work(prompt: GivenPrompt, own: Resolved, rank: int) -> Work[RequestOutput]:
            if self._seeds is not None:
                own = own.with_seed(self._seeds.getrandbits(SEED_BITS))

            def do(request_id: str, tokenised: Prompt) -> Any:
                return generate(self._engine, request_id, tokenised, own, cache_salt=prompt.cache_salt, priority=rank)

            check_integer("priority", rank)
            return Work(prompt=prompt, do=do, priority=check_int64("priority", rank))

        works = [work(*each) for each in zip(prompts, resolved, priorities, strict=True)]
        with ProgressBar("Processed prompts", len(works), enabled=_flag(use_tqdm)) as bar:
            return self._run(works, lambda output: _note(bar, output))

    def _resolve(self, params: list[SamplingParams]) -> list[Resolved]:
        """Check each object once, however many prompts it is for."""
        known: dict[int, Resolved] = {}
        for each in params:
            if not isinstance(each, SamplingParams):
                raise InvalidRequest(
                    f"sampling_params must be SamplingParams, got {type(each).__name__}", param="sampling_params"
                )
            if id(each) not in known:
                known[id(each)] = resolve(each, text=self._engine.text, limits=self._limits)
        return [known[id(each)] for each in params]

    def _run(
        self, works: list[Work[ResultT]], on_done: Callable[[ResultT], None], *, limit: int | None = None
    ) -> list[ResultT]:
        self._check_open()
        results = self._background.run(self._runs.all(works, on_done, limit=limit))
        errors = {index: each for index, each in enumerate(results) if isinstance(each, MeshError)}
        finished = [None if isinstance(each, MeshError) else each for each in results]
        if not errors:
            return [each for each in finished if each is not None]
        raise errors[0] if len(works) == 1 else PromptsFailed(finished, errors)

    def _check_open(self) -> None:
        if not self._finalizer.alive:
            raise InternalError("this LLM is closed")

    def _text(self, chat_template: str | None) -> TextModel:
        text = self._engine.text
        return text if chat_template is None else text.with_chat_template(chat_template)


async def _open(config: Any, closing: AsyncExitStack) -> OfflineEngine:
    return await closing.enter_async_context(offline_engine(config))


def _close(background: BackgroundLoop, closing: AsyncExitStack) -> None:
    if background.usable:
        background.run(closing.aclose())
        background.close()


def _flag(use_tqdm: bool) -> bool:
    if not isinstance(use_tqdm, bool):
        raise InvalidRequest("use_tqdm must be True or False; the bar is rich's", param="use_tqdm")
    return use_tqdm


def _note(bar: ProgressBar, output: RequestOutput) -> None:
    bar.advance(num_in=len(output.prompt_token_ids), num_out=sum(len(answer.token_ids) for answer in output.outputs))
