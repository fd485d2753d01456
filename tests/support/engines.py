"""Engine services on an event loop of this process, each with its real core process, sockets and shared memory; and a
client that speaks to them as the proxy does.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Coroutine, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import grpc.aio

from pdmesh.config import EngineConfig
from pdmesh.engine.server.identity import Role
from pdmesh.engine.server.service import serve_engine
from pdmesh.errors import from_code
from pdmesh.grpc_options import GRPC_OPTIONS
from pdmesh.lifecycle import Life
from pdmesh.protocol import mesh_pb2 as pb
from pdmesh.protocol.mesh_pb2_grpc import EngineStub
from pdmesh.protocol.messages import ChoiceDelta, GenerateRequest, SamplingParams
from pdmesh.protocol.wire import delta_from_pb, request_to_pb
from pdmesh.security import MeshSecret

SECRET = "a-secret-for-the-tests"
TIMEOUT_S = 60.0

ResultT = TypeVar("ResultT")


class LoopThread:
    """An event loop in a thread of its own, so that services outlive the test that started them."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever, daemon=True)
        self._thread.start()

    def run(self, coroutine: Coroutine[Any, Any, ResultT]) -> ResultT:
        return asyncio.run_coroutine_threadsafe(asyncio.wait_for(coroutine, TIMEOUT_S), self.loop).result()

    def close(self) -> None:
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join()
        self.loop.close()


@contextmanager
def loop_thread() -> Iterator[LoopThread]:
    thread = LoopThread()
    try:
        yield thread
    finally:
        thread.close()


class RecordingLife(Life):
    """Keeps what a supervisor would be told."""

    def __init__(self) -> None:
        super().__init__()
        self.facts: dict[str, Any] = {}
        self.is_ready = asyncio.Event()

    def ready(self, **facts: object) -> None:
        self.facts = facts
        self.is_ready.set()


class RunningEngine:
    """One engine service of this process."""

    def __init__(self, config: EngineConfig, role: Role) -> None:
        self.life = RecordingLife()
        self.task = asyncio.create_task(serve_engine(config, self.life, role))

    @property
    def grpc(self) -> str:
        return f"127.0.0.1:{self.life.facts['grpc_port']}"

    @property
    def http(self) -> str:
        return f"http://127.0.0.1:{self.life.facts['http_port']}"

    @property
    def engine_id(self) -> str:
        return str(self.life.facts["engine_id"])

    async def ready(self) -> RunningEngine:
        ready = asyncio.create_task(self.life.is_ready.wait())
        await asyncio.wait({ready, self.task}, return_when=asyncio.FIRST_COMPLETED)
        ready.cancel()
        if self.task.done():
            self.task.result()
            raise AssertionError("the engine ended before it was ready")
        return self

    async def stop(self) -> None:
        self.life.stop()
        await self.task


@dataclass
class Pair:
    """Two engines with one model, and the loop they live on."""

    loop: LoopThread
    prefill: RunningEngine
    decode: RunningEngine
    model: str


@contextmanager
def running_pair(model: str) -> Iterator[Pair]:
    """A prefill and a decode engine that serve, until the context is left."""
    with loop_thread() as loop:
        prefill, decode = loop.run(start_engines(model, "prefill", "decode"))
        yield Pair(loop, prefill, decode, model)
        loop.run(prefill.stop())
        loop.run(decode.stop())


async def start_engines(model: str, *roles: Role, **settings: Any) -> list[RunningEngine]:
    """Start engines side by side and wait until all serve."""
    defaults: dict[str, Any] = {
        "model": model,
        "port": 0,
        "grpc_port": 0,
        "cpu_threads": 1,
        "kv_cache_memory_bytes": 8 << 20,
        "max_num_batched_tokens": 256,
        "block_size": 16,
        "secret": SECRET,
        "drain_timeout_s": 0.5,
    }
    engines = [RunningEngine(EngineConfig(**(defaults | settings)), role) for role in roles]
    try:
        return [await engine.ready() for engine in engines]
    except BaseException:
        for engine in engines:
            engine.life.stop()
        await asyncio.wait([engine.task for engine in engines])
        raise


class ProxySession:
    """A proxy's data and control stream to one engine."""

    def __init__(self, channel: grpc.aio.Channel, session_id: str, secret: str = SECRET) -> None:
        self.stub = EngineStub(channel)
        self.metadata = (("pdmesh-session", session_id), *MeshSecret(secret).call_metadata())
        self.data = self.stub.Generate(metadata=self.metadata)
        self.control = self.stub.Control(metadata=self.metadata)
        self._inboxes: dict[str, asyncio.Queue[ChoiceDelta]] = {}
        self._writing = asyncio.Lock()
        self.num_frames = 0
        self._reader: asyncio.Task[None] | None = None

    async def submit(self, request: GenerateRequest) -> None:
        self._inboxes[request.request_id] = asyncio.Queue()
        async with self._writing:
            await self.data.write(pb.SubmitFrame(requests=[request_to_pb(request)]))
        if self._reader is None:
            self._reader = asyncio.create_task(self._read())

    async def next_delta(self, request_id: str) -> ChoiceDelta:
        return await asyncio.wait_for(self._inboxes[request_id].get(), 30)

    async def run(self, request: GenerateRequest) -> list[ChoiceDelta]:
        """Submit and collect all deltas. Raises the request's error."""
        await self.submit(request)
        return await self.collect(request)

    async def collect(self, request: GenerateRequest) -> list[ChoiceDelta]:
        deltas: list[ChoiceDelta] = []
        open_choices = set(request.choices)
        while open_choices:
            delta = await self.next_delta(request.request_id)
            if delta.error_code:
                raise from_code(delta.error_code, delta.error_message, delta.error_param or None)
            deltas.append(delta)
            if delta.finish_reason or (request.prefill_only and delta.token_ids):
                open_choices.discard(delta.choice)
        return deltas

    async def tell(self, **fields: Any) -> None:
        await self.control.write(pb.ControlUp(**fields))

    async def load(self, *, until: Any = lambda load: True) -> pb.LoadReport:
        """Read the control stream until a load report satisfies `until`."""
        while True:
            message = await asyncio.wait_for(self.control.read(), 15)
            if message.HasField("load") and until(message.load):
                return message.load

    async def _read(self) -> None:
        while (frame := await self.data.read()) is not grpc.aio.EOF:
            self.num_frames += 1
            for message in frame.deltas:
                delta = delta_from_pb(message)
                self._inboxes[delta.request_id].put_nowait(delta)

    async def break_off(self) -> None:
        """End both streams as a dying proxy does."""
        if self._reader is not None:
            self._reader.cancel()
        self.data.cancel()
        self.control.cancel()


@asynccontextmanager
async def proxy_session(address: str, session_id: str = "proxy-1") -> AsyncIterator[ProxySession]:
    async with grpc.aio.insecure_channel(address, options=GRPC_OPTIONS) as channel:
        session = ProxySession(channel, session_id)
        try:
            yield session
        finally:
            await session.break_off()


def request(request_id: str, num_prompt: int = 40, max_tokens: int = 8, **fields: Any) -> GenerateRequest:
    """A greedy request over a prompt that depends on its length only."""
    sampling = {"temperature": 0.0, "max_tokens": max_tokens, "ignore_eos": True} | fields.pop("sampling", {})
    token_ids = fields.pop("token_ids", [4 + (7 * index + num_prompt) % 300 for index in range(num_prompt)])
    fields = {"deadline_s": 30.0} | fields
    return GenerateRequest(request_id=request_id, token_ids=token_ids, sampling=SamplingParams(**sampling), **fields)


def tokens_of(deltas: list[ChoiceDelta], choice: int = 0) -> list[int]:
    return [token for delta in deltas if delta.choice == choice for token in delta.token_ids]
