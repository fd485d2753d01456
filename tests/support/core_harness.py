"""A whole engine core in this thread: real scheduler, pool, sampler, links and loop, over the fake backend."""

import os
import select
from collections.abc import Iterable, Sequence
from typing import ClassVar

from pdmesh.connector.base import WorkerConnector
from pdmesh.connector.pool import KVPool, PoolShape, create_pool_file, size_pool_file
from pdmesh.connector.staging import StagingArea
from pdmesh.engine.backend import Backend, ProgressCallback
from pdmesh.engine.block_hash import BlockHasher
from pdmesh.engine.block_key import root_key
from pdmesh.engine.block_pool import BlockPool
from pdmesh.engine.core import Core
from pdmesh.engine.executor import Executor
from pdmesh.engine.kv_events import KVEventLog
from pdmesh.engine.kv_groups import KVGroup
from pdmesh.engine.kv_manager import KVManager
from pdmesh.engine.limits import Limits
from pdmesh.engine.links import Links
from pdmesh.engine.logits_processors import LogitsProcessor
from pdmesh.engine.messages import (
    AddRequest,
    BlocksComputed,
    ConnectPeer,
    FromCore,
    OfferSealed,
    PeerConnected,
    Shutdown,
    StepOutput,
    ToCore,
    TransferEnded,
)
from pdmesh.engine.runner import Runner
from pdmesh.engine.scheduler import Scheduler
from pdmesh.engine.self_pull import SelfPulls
from pdmesh.protocol.messages import ChoiceDelta, GenerateRequest, SamplingParams
from support.fake_backend import FakeBackend


class CoreHarness:
    """Send messages, let the core run until it would sleep, look at what it said."""

    opened: ClassVar[list["CoreHarness"]] = []
    """All that a test made; its conftest closes them."""

    def __init__(
        self,
        *,
        num_blocks: int = 64,
        block_size: int = 4,
        enable_prefix_caching: bool = True,
        is_async: bool = False,
        windows: list[int] | None = None,
        with_events: bool = False,
        connectors: dict[str, WorkerConnector] | None = None,
        backend: Backend | None = None,
        processors: Sequence[LogitsProcessor] = (),
        model: str = "",
        lane_bytes: int = 0,
        with_sums: bool = False,
        **limits: float,
    ) -> None:
        self.backend = backend or FakeBackend(block_size, windows=windows or [0])
        info = self.backend.load(model, "auto", block_size, ProgressCallback())
        shape = PoolShape(num_blocks, info.groups[0].block_bytes)
        fd = create_pool_file("test")
        size_pool_file(fd, shape)
        self.pool = KVPool(fd, shape, writable=True)
        os.close(fd)
        # What was in memory before must never be read.
        self.pool.blocks[:] = 0xAB
        self.backend.bind(self.pool)
        self.pool.staging = StagingArea(lane_bytes) if lane_bytes else None
        self.connectors = connectors or {}
        self.metadata = {name: connector.register(self.pool) for name, connector in self.connectors.items()}
        self.links = Links(self.connectors, self.pool)
        eos = frozenset(info.eos_token_ids)
        values = {"max_num_batched_tokens": 64, "max_num_seqs": 16, "max_model_len": 200} | limits
        self.limits = Limits(vocab_size=info.vocab_size, eos_token_ids=eos, **values)
        self.groups = groups = [KVGroup(block_size, spec.kind, spec.window, spec.layout) for spec in info.groups]
        self.events = KVEventLog(groups) if with_events else None
        kv = KVManager(
            groups,
            BlockPool(num_blocks, len(groups), self.pool, self.events),
            BlockHasher("sha256", "", block_size),
            max_chunk_tokens=self.limits.max_num_batched_tokens,
            tier_root=root_key(info.fingerprint, info.groups[0].fingerprint, 0),
            enable_prefix_caching=enable_prefix_caching,
            events=self.events,
        )
        self.scheduler = Scheduler(kv, self.limits)
        self.sent: list[FromCore] = []
        self._inbox = _ScriptedInbox()
        self.opened.append(self)
        runner = Runner(
            self.backend,
            num_rows=self.limits.max_num_seqs,
            max_model_len=self.limits.max_model_len,
            num_groups=len(groups),
            block_size=block_size,
            eos_token_ids=eos,
            processors=processors,
        )
        self.runner = runner
        self.executor = Executor(runner, is_async=is_async)
        own = SelfPulls(kv, self.pool)
        self._core = Core(
            self.scheduler,
            self.executor,
            self.links,
            self._inbox,
            self.sent.append,
            self.events,
            own,
            self.pool if with_sums else None,
        )

    def send(self, *messages: ToCore) -> None:
        self._inbox.messages += messages

    def add(self, prompt: list[int], request_id: str = "r", **options: object) -> None:
        """Queue a request; options are split between AddRequest, GenerateRequest and SamplingParams by name."""
        self.send(make_add(prompt, request_id, **options))

    def offer(self, prompt: list[int], **options: object) -> OfferSealed:
        """Have a prompt computed for an offer, the only one so far."""
        self.add(prompt, prefill_only=True, offer_id="offer", **options)
        self.run()
        [sealed] = self.sealed
        return sealed

    def run(self, *messages: ToCore) -> list[FromCore]:
        """Let the core work until it would sleep with nothing under way; return what it said meanwhile."""
        self.send(*messages)
        self._inbox.links = self.links
        self._inbox.scheduler = self.scheduler
        self._inbox.executor = self.executor
        start = len(self.sent)
        self._core._is_stopping = False
        self._core.run()
        self.scheduler.state.check_integrity()
        return self.sent[start:]

    def step(self) -> None:
        """Plan, execute and take in one step, here and now."""
        schedule = self.scheduler.schedule()
        if schedule.sequences:
            self.scheduler.update(schedule, self.runner.run(schedule.plan))

    def connect(self, order: ConnectPeer) -> PeerConnected:
        """Have a peer connected and return the answer."""
        self.send(order)
        for _ in range(10):
            answers = [message for message in self.run() if isinstance(message, PeerConnected)]
            if answers:
                return answers[0]
            select.select(self.links.descriptors, [], [], 1)
        raise AssertionError("connecting was not answered")

    def reach(self, owner: "CoreHarness", peer_id: str) -> None:
        """Have the pool of another core, or its own, connected over shm."""
        order = ConnectPeer(
            peer_id=peer_id,
            connector="shm",
            metadata=owner.metadata["shm"],
            num_blocks=owner.pool.shape.num_blocks,
            block_bytes=owner.pool.shape.block_bytes,
        )
        assert self.connect(order).error == ""

    @property
    def outputs(self) -> list[StepOutput]:
        return [message for message in self.sent if isinstance(message, StepOutput)]

    @property
    def deltas(self) -> list[ChoiceDelta]:
        return [delta for output in self.outputs for delta in output.deltas]

    @property
    def sealed(self) -> list[OfferSealed]:
        return [each for output in self.outputs for each in output.sealed]

    @property
    def transfers(self) -> list[TransferEnded]:
        return [each for output in self.outputs for each in output.transfers]

    @property
    def computed(self) -> list[BlocksComputed]:
        return [each for output in self.outputs for each in output.computed]

    def tokens(self, request_id: str = "r", choice: int = 0) -> list[int]:
        deltas = self.deltas_of(request_id, choice)
        return [token for delta in deltas for token in delta.token_ids]

    def deltas_of(self, request_id: str = "r", choice: int = 0) -> list[ChoiceDelta]:
        return [delta for delta in self.deltas if (delta.request_id, delta.choice) == (request_id, choice)]

    def finish_reason(self, request_id: str = "r", choice: int = 0) -> str:
        return self.deltas_of(request_id, choice)[-1].finish_reason

    @property
    def num_used(self) -> int:
        return self.scheduler.state.kv.num_used

    def close(self) -> None:
        self.opened.remove(self)
        self.executor.close()
        self.links.close()
        self.backend.close()
        if self.pool.staging is not None:
            self.pool.staging.close()
        self.pool.close()


def make_add(prompt: list[int], request_id: str = "r", **options: object) -> AddRequest:
    """Make an AddRequest; greedy and without an end at EOS unless told otherwise."""
    fields: dict[type, dict[str, object]] = {SamplingParams: {}, AddRequest: {}, GenerateRequest: {}}
    for name, value in options.items():
        owner = next(owner for owner in fields if name in owner.__struct_fields__)
        fields[owner][name] = value
    sampling = SamplingParams(**{"temperature": 0.0, "ignore_eos": True, "max_tokens": 8} | fields[SamplingParams])
    choices = list(range(sampling.n))
    request = GenerateRequest(
        **{"request_id": request_id, "token_ids": prompt, "sampling": sampling, "choices": choices}
        | fields[GenerateRequest]
    )
    return AddRequest(request=request, **fields[AddRequest])


class _ScriptedInbox:
    """Messages put in by the test; when the core would sleep for good, it is told to stop."""

    num_dropped = 0

    def __init__(self) -> None:
        self.messages: list[ToCore] = []
        self.links: Links
        self.scheduler: Scheduler
        self.executor: Executor

    def drain(self) -> Iterable[ToCore]:
        taken, self.messages = self.messages, []
        return taken

    def wait(self, descriptors: list[int], timeout_s: float | None = None) -> bool:
        is_busy = self.scheduler.state.ledger.num_loads > 0 or not self.executor.is_idle
        readable, _, _ = select.select(descriptors, [], [], 10 if is_busy else 0)
        if not readable:
            assert not is_busy, "a pull or a step did not end"
            if timeout_s is None:
                self.messages.append(Shutdown())
        return bool(readable)
