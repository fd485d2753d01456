"""How a request is brought to each moment of its life and kept there until the fault has been done.

Everything here looks from outside and holds from outside: by other requests that set an engine's pace, by the tests' own
logits processor, and by SIGSTOP for a few tenths of a second.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from faults.client import Ballast, Client, wait_until
from faults.matrix import Column, Connector, Fault, Row, Target
from faults.node import Node
from faults.pools import contents
from faults.stage import PREFILL_ROWS, SLOW_BYTES_S, Stage
from faults.wires import Quality

REACHED_WITHIN_S = 20.0
NUM_TOKENS = 12
HOLD_DECODING_AT = 5
# An engine that has just ended a request may look busy to the router for a moment; this is more.
NUM_STEERING = 2
STEP_S = 0.08
"""A step of a prefill with ballast: ten chunks last long enough to be seen."""
SLOW_STEP_S = 0.2
BALLAST_PROMPT = [5, 6, 7, 8, 9, 10, 11, 12]
# More than one block.
ACQUAINTANCE_TOKENS = 40
BLOCK_TOKENS = 32
WRITES = "pdmesh_kvcache_backing_writes_total"
# A pull of these sizes takes a few milliseconds when nothing holds it.
PULLED_WITHIN_S = 0.4
# One that is slowed down takes two seconds.
PART_S = 0.5
NUM_LAST_BLOCKS = 4


@dataclass(slots=True)
class Scene:
    """One request under way, and all that holds it where it is."""

    stage: Stage
    body: dict[str, Any]
    """The request."""
    ask: Callable[[dict[str, Any]], Client]
    """Sends it, with these `vllm_xargs`."""
    hold: Path
    """While this exists, steps that look at it wait."""
    client: Client | None = None
    prefill: Node | None = None
    """The one that has the request, or had it."""
    ballast: list[Ballast] = field(default_factory=list)
    extra_args: dict[str, Any] = field(default_factory=dict)

    @property
    def decode(self) -> Node:
        """The one that has the request or will: the others are kept dearer by ballast."""
        return self.stage.decodes[0]

    def start(self) -> Client:
        self.client = self.ask(self.extra_args)
        return self.client

    def steer(self) -> None:
        """Make every decode but the first one the router's second choice."""
        for node in self.stage.decodes[1:]:
            self._put_ballast(node, NUM_STEERING, pace_s=SLOW_STEP_S)

    def load_prefills(self, rows: int) -> None:
        for node in self.stage.prefills:
            self._put_ballast(node, rows, pace_s=STEP_S, hold=str(self.hold))

    def _put_ballast(self, node: Node, count: int, *, pace_s: float, hold: str = "") -> None:
        for _ in range(count):
            self.ballast.append(Ballast(node.host, node.port, BALLAST_PROMPT, pace_s=pace_s, hold=hold))
        wait_until(lambda: running(node) == count, REACHED_WITHIN_S, f"{count} requests at {node.name}")

    def find_prefill(self, is_it: Callable[[dict[str, float]], bool], what: str) -> Node:
        """Wait until one prefill looks so; that one has the request."""
        found: list[Node] = []

        def look() -> bool:
            found.extend(node for node in self.stage.prefills if is_it(node.metrics()))
            return bool(found)

        wait_until(look, REACHED_WITHIN_S, what)
        self.prefill = found[0]
        return found[0]

    def release(self, frozen: Node | None) -> None:
        """Let everything go on, but for a node that the fault has frozen."""
        self.hold.unlink(missing_ok=True)
        for node in self.stage.nodes:
            if node is not frozen:
                node.thaw()
        for ballast in self.ballast:
            ballast.close()
        self.ballast = []


def reach(scene: Scene, row: Row, column: Column) -> None:
    """Bring the request to this moment; `release` lets it go on. Before admission there is no request yet.

    What is fetched, for rows about the tier, are the tier's blocks.
    """
    scene.steer()
    if column is Column.MID_FETCH and row.target is Target.KVCACHE:
        _mid_fetch_from_tier(scene)
    elif column is Column.MID_FETCH and row.target is Target.VALKEY:
        _mid_fetch_from_valkey(scene)
    elif column is Column.MID_FETCH and row.fault is Fault.EXPIRY:
        _about_to_read(scene)
    else:
        REACHING[column](scene)


def _before(scene: Scene) -> None:
    scene.prefill = min(scene.stage.prefills, key=lambda node: node.metric("vllm:prompt_tokens_total"))


def _queued(scene: Scene) -> None:
    scene.load_prefills(PREFILL_ROWS)
    scene.start()
    scene.find_prefill(lambda metrics: metrics.get("vllm:num_requests_waiting", 0) >= 1, "queued at a prefill")


def _mid_prefill(scene: Scene) -> None:
    client = _begin_prefill(scene)
    scene.hold.touch()
    time.sleep(2 * STEP_S)
    assert not client.tokens, "the prompt was computed before the step could be held"


def _begin_prefill(scene: Scene) -> Client:
    """Have a prefill compute a chunk, slowly; where engines push, have it push too."""
    is_pushed = scene.stage.settings.connector is Connector.PUSH
    if is_pushed:
        _acquaint(scene)
    pushed = _pushed_bytes(scene)
    scene.load_prefills(1)
    client = scene.start()
    scene.find_prefill(lambda metrics: metrics.get("vllm:num_requests_running", 0) == 2, "a chunk is computed")
    if is_pushed:
        wait_until(lambda: _pushed_bytes(scene) > pushed, REACHED_WITHIN_S, "a chunk is pushed")
    return client


def _pushed_bytes(scene: Scene) -> float:
    return sum(node.metric("pdmesh_push_bytes_total") for node in scene.stage.prefills)


def _acquaint(scene: Scene) -> None:
    """Have the decode know every prefill: a frozen one shakes no hands."""
    for _ in range(2 * len(scene.stage.prefills)):
        prompt = [random.randrange(10, 370) for _ in range(ACQUAINTANCE_TOKENS)]
        _complete(scene, {"prompt": prompt, "max_tokens": 2, "temperature": 0, "ignore_eos": True})
    wait_until(lambda: running(scene.decode) == 0, REACHED_WITHIN_S, "the decode is at rest")


def _offered(scene: Scene) -> None:
    if scene.stage.settings.connector is Connector.PUSH:
        # Some of it has arrived by then.
        client = _begin_prefill(scene)
        scene.decode.freeze_server()
    else:
        _acquaint(scene)
        scene.decode.freeze_server()
        client = scene.start()
    client.wait_tokens(1, REACHED_WITHIN_S)
    scene.find_prefill(lambda metrics: metrics.get("pdmesh_offers_open") == 1, "an offer")


def _mid_fetch(scene: Scene) -> None:
    _acquaint(scene)
    _begin_pull(scene)


def _begin_pull(scene: Scene) -> None:
    """Send the request and have its pull under way and held: by its pace, or by a frozen transport."""
    is_slow = _slow_down(scene)
    if not is_slow:
        scene.decode.freeze_transport()
    client = scene.start()
    client.wait_tokens(1, REACHED_WITHIN_S)
    scene.find_prefill(lambda metrics: metrics.get("pdmesh_transfers_reading") == 1, "a pull")
    if is_slow:
        time.sleep(PART_S)


def _about_to_read(scene: Scene) -> None:
    """Have the transfer begun and its read not, whatever reads: the time that a pull has runs from when it begins to read, so
    that it is the owner's memory, and no clock of its own, that tells a reader that it is late.
    """
    _acquaint(scene)
    scene.decode.freeze_core()
    client = scene.start()
    client.wait_tokens(1, REACHED_WITHIN_S)
    scene.find_prefill(lambda metrics: metrics.get("pdmesh_transfers_reading") == 1, "a transfer")


def _complete(scene: Scene, body: dict[str, Any]) -> None:
    answer = httpx.post(f"{scene.stage.proxies[0].url}/v1/completions", json=body, timeout=30)
    assert answer.status_code == 200, answer.text


def put_into_tier(scene: Scene) -> None:
    """Have the request's prompt in the kvcache service, and behind it, and in no engine."""
    kvcache = scene.stage.kvcache
    # A disk that was full before has room again, which the tier finds out within its interval.
    wait_until(lambda: kvcache.metric("pdmesh_kvcache_backing_writable") == 1, REACHED_WITHIN_S, "Valkey takes writes")
    before = kvcache.metric(WRITES)
    _complete(scene, scene.body | {"max_tokens": 1})
    num_blocks = len(scene.body["prompt"]) // BLOCK_TOKENS
    wait_until(lambda: kvcache.metric(WRITES) >= before + num_blocks, REACHED_WITHIN_S, f"{num_blocks} blocks written")
    for engine in scene.stage.engines:
        assert httpx.post(f"{engine.url}/reset_prefix_cache", timeout=10).status_code == 200


def leave_to_valkey(scene: Scene) -> None:
    """Empty the kvcache service's own memory."""
    kvcache = scene.stage.kvcache
    kvcache.kill()
    kvcache.start()
    kvcache.wait_ready()
    wait_until(lambda: kvcache.metric("pdmesh_kvcache_backing_up") == 1, REACHED_WITHIN_S, "Valkey is known")


def _mid_fetch_from_tier(scene: Scene) -> None:
    put_into_tier(scene)
    for prefill in scene.stage.prefills:
        prefill.freeze_transport()
    scene.start()
    kvcache = scene.stage.kvcache
    wait_until(lambda: kvcache.metric("pdmesh_kvcache_slots_pinned") > 0, REACHED_WITHIN_S, "a pull from the tier")


def _mid_fetch_from_valkey(scene: Scene) -> None:
    put_into_tier(scene)
    leave_to_valkey(scene)
    scene.stage.valkey.freeze()
    scene.start()
    time.sleep(PULLED_WITHIN_S)


def _slow_down(scene: Scene) -> bool:
    """Whether a pull takes seconds: over a connector that is told so, or over wires that are thin from now on."""
    wires = scene.stage.settings.wires
    if wires is None:
        return scene.stage.settings.connector is Connector.GRPC
    for prefill in scene.stage.prefills:
        wires.set(prefill.station, scene.decode.station, Quality(rate_bytes_s=SLOW_BYTES_S))
    return True


def _fetched(scene: Scene) -> None:
    _acquaint(scene)
    # Asked while it can answer: what it has from elsewhere, the acquaintance's prompts among it, does not count as fetched.
    known = contents(scene.decode)
    _begin_pull(scene)
    # The last one is partly filled, and is fetched like the others.
    num_blocks = -(-len(scene.body["prompt"]) // BLOCK_TOKENS)
    if _slow_down(scene):
        # Its server is frozen no sooner than it must be: it has a proxy to answer.
        _wait_there(scene, known, num_blocks - NUM_LAST_BLOCKS)
    # The pull ends in the core, which may go on with the request, and nobody in the server hears of it.
    scene.decode.freeze_server()
    scene.decode.thaw_transport()
    _wait_there(scene, known, num_blocks)
    # The blocks' generations and checksums are compared after the last byte; then there is nothing left to do.
    wait_until(scene.decode.engine_rests, REACHED_WITHIN_S, f"{scene.decode.name} has compared what it pulled")


def _wait_there(scene: Scene, known: set[bytes], count: int) -> None:
    """Wait until so many blocks are in the decode's memory that were not."""
    wait_until(lambda: len(contents(scene.decode) - known) >= count, REACHED_WITHIN_S, f"{count} blocks pulled")


def _generating(count: int) -> Callable[[Scene], None]:
    def reach_it(scene: Scene) -> None:
        computed = {node.name: node.metric("vllm:prompt_tokens_total") for node in scene.stage.prefills}
        scene.hold.touch()
        scene.extra_args = {"hold": str(scene.hold), "hold_at": count}
        client = scene.start()
        client.wait_tokens(count, REACHED_WITHIN_S)
        scene.prefill = next(
            (node for node in scene.stage.prefills if node.metric("vllm:prompt_tokens_total") > computed[node.name]),
            scene.stage.prefills[0],
        )

    return reach_it


REACHING: dict[Column, Callable[[Scene], None]] = {
    Column.BEFORE: _before,
    Column.QUEUED: _queued,
    Column.MID_PREFILL: _mid_prefill,
    Column.OFFERED: _offered,
    Column.MID_FETCH: _mid_fetch,
    Column.FETCHED: _fetched,
    Column.DECODING: _generating(HOLD_DECODING_AT),
    Column.LAST: _generating(NUM_TOKENS - 1),
}


def running(node: Node) -> float:
    return node.metric("vllm:num_requests_running")
