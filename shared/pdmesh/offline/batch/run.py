"""Runs the lines of a batch through the serving code of the HTTP API, a bounded number at a time."""

import asyncio
import codecs
import logging
import uuid
from collections.abc import Iterable
from dataclasses import dataclass

import msgspec
from prometheus_client import CollectorRegistry

from pdmesh.config import HttpConfig
from pdmesh.errors import InternalError, InvalidRequest, MeshError
from pdmesh.offline.batch.lines import URLS, BatchRequest, CustomIds, LineFault, answer_line, failure_line, read_line
from pdmesh.offline.batch.output import BatchOutput
from pdmesh.offline.engine import OfflineEngine
from pdmesh.offline.progress import ProgressBar
from pdmesh.openai.http.body import parse_body
from pdmesh.openai.intake.identity import Caller, narrow_salt
from pdmesh.openai.job import CANCELLED, Job
from pdmesh.openai.metrics import ApiMetrics
from pdmesh.openai.schemas import ChatBody, CompletionBody
from pdmesh.openai.serving import Serving

log = logging.getLogger(__name__)

# The longest that a setting of the HTTP API allows: a line waits for nobody but the lines before it.
LINE_TIMEOUT_S = 86400.0


@dataclass(slots=True)
class BatchCounts:
    """How a batch ended."""

    answered: int = 0
    failed: int = 0
    kept: int = 0
    """Answered by an earlier run."""


class BatchRun:
    """One pass over an input."""

    def __init__(self, engine: OfflineEngine, output: BatchOutput, bar: ProgressBar, *, max_concurrency: int) -> None:
        self._engine = engine
        self._output = output
        self._bar = bar
        self._slots = asyncio.Semaphore(max_concurrency)
        self._serving = Serving(
            generator=engine.generator,
            text=engine.text,
            config=HttpConfig(
                max_logprobs=engine.config.max_logprobs,
                reasoning_start_str=engine.config.reasoning_start_str,
                reasoning_end_str=engine.config.reasoning_end_str,
                request_timeout_s=LINE_TIMEOUT_S,
            ),
            # The strict one: no parameters that only engines take of each other.
            role="proxy",
            metrics=ApiMetrics(CollectorRegistry()),
            salt_for=narrow_salt,
        )
        self.counts = BatchCounts()

    async def all(self, lines: Iterable[bytes]) -> None:
        """Answer every line that is not blank. Cancelling aborts what runs. Raises MeshError when the engine is gone."""
        known = CustomIds()
        try:
            async with asyncio.TaskGroup() as tasks:
                for number, line in enumerate(lines, start=1):
                    if number == 1:
                        # Editors of Windows begin a file with it.
                        line = line.removeprefix(codecs.BOM_UTF8)
                    if not line.strip():
                        continue
                    await self._slots.acquire()
                    request = self._read(line, number, known)
                    if request is None:
                        self._slots.release()
                    else:
                        tasks.create_task(self._answer(request, number))
        except BaseExceptionGroup as group:
            raise _first(group) from None

    def _read(self, line: bytes, number: int, known: CustomIds) -> BatchRequest | None:
        """Return the request of a line that is still to be run."""
        try:
            request = read_line(line, number, known)
        except LineFault as fault:
            self._fail(number, fault.custom_id, _new_id(), fault.error)
            return None
        if self._output.has(number, request.custom_id):
            self.counts.kept += 1
            self._bar.advance()
            return None
        return request

    async def _answer(self, request: BatchRequest, number: int) -> None:
        request_id = _new_id()
        job: Job | None = None
        try:
            job = await self._job(request, request_id)
            whole = await job.whole()
        except MeshError as exc:
            await self._ended_badly(request, number, request_id, job, exc)
        except Exception:
            log.exception("line %d failed", number)
            error = InternalError("this line made the program fail; its log says why")
            await self._ended_badly(request, number, request_id, job, error)
        else:
            self._succeed(request, number, request_id, job, whole)
        finally:
            if job is not None:
                job.ended(outcome=CANCELLED)
            self._slots.release()

    async def _job(self, request: BatchRequest, request_id: str) -> Job:
        caller = Caller(api_key="", request_id=request_id, has_own_id=False)
        if request.url == URLS[0]:
            chat, raw = parse_body(request.body, ChatBody)
            _refuse_stream(chat.stream)
            return await self._serving.chat(chat, raw, caller)
        completion, raw = parse_body(request.body, CompletionBody)
        _refuse_stream(completion.stream)
        return await self._serving.completion(completion, raw, caller)

    def _succeed(self, request: BatchRequest, number: int, request_id: str, job: Job, whole: msgspec.Struct) -> None:
        job.ended()
        usage = job.answer.run.usage()
        self._output.write(number, answer_line(request.custom_id, request_id, whole))
        self.counts.answered += 1
        self._bar.advance(num_in=usage.prompt_tokens, num_out=usage.completion_tokens)

    async def _ended_badly(
        self, request: BatchRequest, number: int, request_id: str, job: Job | None, error: MeshError
    ) -> None:
        if job is not None:
            job.ended(error)
        if not await self._engine.generator.healthy():
            # It is not this line that failed: the next run may answer it.
            raise error
        self._fail(number, request.custom_id, request_id, error)

    def _fail(self, number: int, custom_id: str | None, request_id: str, error: MeshError) -> None:
        self._output.write(number, failure_line(custom_id, request_id, error))
        self.counts.failed += 1
        self._bar.advance()


def _refuse_stream(stream: bool | None) -> None:
    if stream:
        raise InvalidRequest("stream is not available in a batch", param="stream")


def _new_id() -> str:
    return uuid.uuid4().hex


def _first(group: BaseExceptionGroup[BaseException]) -> BaseException:
    first = group.exceptions[0]
    return _first(first) if isinstance(first, BaseExceptionGroup) else first
