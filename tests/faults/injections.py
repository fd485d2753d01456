"""What is done to the mesh: one function for each fault, from outside, as it would happen to it."""

from __future__ import annotations

import contextlib
import random
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import httpx
import redis

from faults.client import wait_until
from faults.clocks import SKEW_S, skewed
from faults.columns import Scene, leave_to_valkey, put_into_tier
from faults.matrix import GENERATING, NETWORK, UNTIL_OFFERED, Cell, Column, Fault, Target
from faults.node import Node
from faults.pools import damage
from faults.wires import Quality
from pdmesh.protocol.offers import OFFER_LEASE_S
from pdmesh_kvcache.value import NAMESPACE

FROZEN_S = 5.0
EXPIRED_WITHIN_S = OFFER_LEASE_S + 6.0
NOTICED_WITHIN_S = 10.0
OTHER_PROMPT_TOKENS = 1000
# Enough to go through a whole pool of the tests' engines.
NUM_OTHER_PROMPTS = 12
# Of the request's decode and proxy; all else has the machine's time.
WALL_SKEWS_S = (SKEW_S, -SKEW_S)
QUALITIES = {Fault.DROP: Quality(drop=0.1), Fault.DELAY: Quality(delay_s=0.5), Fault.CUT: Quality(cut=True)}


@dataclass(slots=True)
class Injected:
    """A fault that has been done."""

    frozen: Node | None = None
    """Must stay so when all else goes on."""
    finish: Callable[[], None] = lambda: None
    """Return when the fault is over; the answer has come by then."""


def prepare(scene: Scene, cell: Cell) -> None:
    """Do beforehand what takes long."""
    row = cell.row
    if row.fault is Fault.CORRUPT and cell.column is Column.BEFORE:
        put_into_tier(scene)
        leave_to_valkey(scene)
    elif row.fault is Fault.WRONG_MODEL and not scene.stage.stranger.is_alive:
        scene.stage.stranger.start()
        scene.stage.stranger.wait_ready()

    elif row.fault is Fault.CLOCK_SKEW:
        _skew(scene)


def inject(scene: Scene, cell: Cell) -> Injected:
    """Do it. The request is where it should be."""
    row = cell.row
    if row.target is not Target.NONE:
        return ON_PROCESS[row.fault](_node(scene, row.target))
    if row.fault in NETWORK:
        return _spoil(scene, cell.column, QUALITIES[row.fault])
    if row.fault is Fault.CORRUPT and cell.column is Column.BEFORE:
        return _corrupt_valkey(scene)
    return INJECTIONS[row.fault](scene)


def _node(scene: Scene, target: Target) -> Node:
    stage = scene.stage
    if target is Target.PREFILL:
        assert scene.prefill is not None
        return scene.prefill
    return {
        Target.PROXY: stage.proxies[0],
        Target.DECODE: scene.decode,
        Target.KVCACHE: stage.kvcache,
        Target.VALKEY: stage.valkey,
    }[target]


def _kill(node: Node) -> Injected:
    node.kill()
    return Injected()


def _freeze(node: Node) -> Injected:
    node.freeze()
    timer = threading.Timer(FROZEN_S, node.thaw)
    timer.start()
    return Injected(frozen=node, finish=timer.join)


def _restart(node: Node) -> Injected:
    """SIGTERM now; the new one comes as soon as the old has ended, whatever goes on meanwhile."""
    node.terminate()
    failures: list[BaseException] = []

    def again() -> None:
        try:
            node.wait_ended()
            node.start()
            node.wait_ready()
        except BaseException as exc:  # told where the test can see it
            failures.append(exc)

    thread = threading.Thread(target=again)
    thread.start()

    def finish() -> None:
        thread.join()
        if failures:
            raise failures[0]

    return Injected(finish=finish)


def _expire(scene: Scene) -> Injected:
    """Whoever renews is frozen for longer than a lease, and the offer's blocks get other content."""
    assert scene.prefill is not None
    for node in (*scene.stage.proxies, scene.decode):
        node.freeze()
    prefill = scene.prefill
    wait_until(lambda: prefill.metric("pdmesh_offers_open") == 0, EXPIRED_WITHIN_S, "the offer's lease ends")
    _overwrite(prefill)
    return Injected()


def _overwrite(prefill: Node) -> None:
    """Have an engine use every block of its pool for something else."""

    def ask(_: int) -> None:
        # Nobody's: what the tier has is fetched, which may take long while others are frozen.
        prompt = [random.randrange(10, 370) for _ in range(OTHER_PROMPT_TOKENS)]
        body = {"prompt": prompt, "max_tokens": 1, "temperature": 0}
        answer = httpx.post(f"{prefill.url}/v1/completions", json=body, timeout=30)
        assert answer.status_code == 200, answer.text

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(ask, range(NUM_OTHER_PROMPTS)))


def _corrupt(scene: Scene) -> Injected:
    """A few numbers in every block in use in the owner's pool become others, after the offer was sealed."""
    assert scene.prefill is not None
    prefill = scene.prefill
    assert damage(prefill) > 0
    # Its own prefix cache holds these blocks too: such a machine is taken out of service.
    return Injected(finish=prefill.kill)


def _corrupt_valkey(scene: Scene) -> Injected:
    """A byte of every block that Valkey has turns."""
    with contextlib.closing(redis.Redis.from_url(scene.stage.valkey_url)) as client:
        names = list(client.scan_iter(match=f"{NAMESPACE}*:*"))
        assert names
        for name in names:
            size = client.strlen(name)
            (byte,) = client.getrange(name, size // 2, size // 2)
            client.setrange(name, size // 2, bytes([byte ^ 0x55]))

    def finish() -> None:
        assert scene.stage.kvcache.metric("pdmesh_kvcache_values_rejected_total") > 0, "no value was rejected"

    return Injected(finish=finish)


def _fill_disk(scene: Scene) -> Injected:
    """No byte more can be written where Valkey keeps its file."""
    disk = scene.stage.settings.valkey_folder
    # Never the machine's own.
    assert disk.is_mount(), f"{disk} is no disk of the tests'"
    path = disk / "filler"
    with path.open("wb", buffering=0) as file, contextlib.suppress(OSError):
        while True:
            file.write(bytes(1 << 20))
    with path.open("ab", buffering=0) as file, contextlib.suppress(OSError):
        while True:
            file.write(bytes(512))
    return Injected(finish=lambda: path.unlink())


def _wrong_model(scene: Scene) -> Injected:
    """A decode with other weights is listed beside, or instead of, nothing: no request may ever go there."""
    stage = scene.stage
    stage.announce(stage.stranger)
    for proxy in stage.proxies:
        wait_until(lambda proxy=proxy: _refused(proxy) == 1, NOTICED_WITHIN_S, "it is refused")  # type: ignore[misc]
        assert "wrong-decode" in proxy.log, "the reason is not told"

    def finish() -> None:
        stage.announce()
        assert stage.stranger.metric("vllm:prompt_tokens_total") == 0, "the engine with other weights has computed"
        for proxy in stage.proxies:
            wait_until(lambda proxy=proxy: _refused(proxy) == 0, NOTICED_WITHIN_S, "it has left")  # type: ignore[misc]

    return Injected(finish=finish)


def _refused(proxy: Node) -> float:
    return proxy.metric("pdmesh_proxy_engines_refused")


def _disconnect(scene: Scene) -> Injected:
    client = scene.client or scene.start()
    client.leave()
    return Injected()


def _spoil(scene: Scene, column: Column, quality: Quality) -> Injected:
    """The link that the request needs at this moment, both ways, until its answer has ended."""
    wires = scene.stage.settings.wires
    assert wires is not None
    assert scene.prefill is not None
    home = scene.stage.proxies[0].station
    if column in UNTIL_OFFERED:
        ends = (home, scene.prefill.station)
    elif column in GENERATING:
        ends = (home, scene.decode.station)
    else:
        ends = (scene.prefill.station, scene.decode.station)
    wires.set(*ends, quality)
    return Injected(finish=wires.clear)


def _skew(scene: Scene) -> None:
    """Start the decode and the proxy that the request will use anew: monotonic clock and that since boot a minute ahead, the wall
    clock of the one a minute ahead and of the other a minute behind.
    """
    nodes = (scene.decode, scene.stage.proxies[0])
    began_s = int(time.time())
    for node, wall_s in zip(nodes, WALL_SKEWS_S, strict=True):
        node.kill()
        node.start(*skewed(wall_s))
        node.wait_ready()
    scene.stage.mend()
    for node, wall_s in zip(nodes, WALL_SKEWS_S, strict=True):
        # As of its start, by its own clock.
        (card,) = httpx.get(f"{node.url}/v1/models", timeout=10).json()["data"]
        assert began_s <= card["created"] - wall_s <= time.time(), f"the clock of {node.name} is not as it should be"


def _stay_skewed(scene: Scene) -> Injected:
    def finish() -> None:
        for node in (scene.decode, scene.stage.proxies[0]):
            node.kill()

    return Injected(finish=finish)


ON_PROCESS: dict[Fault, Callable[[Node], Injected]] = {
    Fault.KILL: _kill,
    Fault.FREEZE: _freeze,
    Fault.RESTART: _restart,
}
INJECTIONS: dict[Fault, Callable[[Scene], Injected]] = {
    Fault.EXPIRY: _expire,
    Fault.CORRUPT: _corrupt,
    Fault.DISK_FULL: _fill_disk,
    Fault.WRONG_MODEL: _wrong_model,
    Fault.CLOCK_SKEW: _stay_skewed,
    Fault.DISCONNECT: _disconnect,
}
