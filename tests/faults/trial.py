"""One cell, tried: the request is brought to its moment, the fault is done, and what came of it is compared to what must."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import httpx

from faults.client import Client, wait_until
from faults.columns import NUM_TOKENS, Scene, reach
from faults.injections import inject, prepare
from faults.matrix import Answer, Cell, evidence, loses_the_proxy, must_be_forgotten, required
from faults.stage import DEADLINE_S, Stage

PROMPT_TOKENS = 600
FIRST_ORDINARY_TOKEN, LAST_ORDINARY_TOKEN = 10, 370
CLIENT_GRACE_S = 5.0
MAX_TRIES = 3
NOTICED_WITHIN_S = 10.0
OK = 200
MISSED = (AssertionError, OSError, httpx.HTTPError)
"""What a check or a call raises that did not come to what it should."""
NEVER_BEFORE = (Answer.WRONG, Answer.BROKEN, Answer.OTHER)
"""What a client has not got before anything was done to the mesh, whatever holds its request up."""
RightTokens = Callable[[dict[str, Any]], list[int]]
"""What the single engine answers to a request."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """What came of one cell."""

    cell: str
    passed: bool
    reached: bool
    """False: the moment could not be reached, which says nothing of the mesh."""
    tries: tuple[str, ...] = ()
    """What the tries before this one, which missed the moment, came to."""
    answer: str
    """Empty when the try ended before there was one."""
    told: str
    """The error's words."""
    route: str
    answer_s: float
    held_s: float
    """Until nothing was held any more, from the answer on."""
    fault: str
    """What was wrong with it; empty when it passed."""

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def body_of(cell: Cell, number: int = 0) -> dict[str, Any]:
    """The request of a try of a cell: a prompt that nobody has seen, greedy for some and seeded for others."""
    source = random.Random(f"{cell.name} {number}")
    seeded = {"temperature": 1.0, "seed": source.randrange(1 << 30)}
    return {
        "prompt": [source.randrange(FIRST_ORDINARY_TOKEN, LAST_ORDINARY_TOKEN) for _ in range(PROMPT_TOKENS)],
        "max_tokens": NUM_TOKENS,
        "ignore_eos": True,
        **({"temperature": 0} if source.random() < 0.5 else seeded),
    }


def check(stage: Stage, cell: Cell, right_tokens: RightTokens, folder: Path) -> Result:
    """Try a cell; again when its moment was missed, which a busy machine does, and never for any other reason."""
    missed: list[str] = []
    while True:
        body = body_of(cell, len(missed))
        result = attempt(stage, cell, body, right_tokens, folder)
        if result.reached or len(missed) + 1 == MAX_TRIES:
            return replace(result, tries=tuple(missed))
        missed.append(result.fault)


def attempt(stage: Stage, cell: Cell, body: dict[str, Any], right_tokens: RightTokens, folder: Path) -> Result:
    """Try a cell once on a whole mesh, and mend the mesh."""
    expected = right_tokens(body)
    proxies = stage.proxies if loses_the_proxy(cell) else stage.proxies[:1]
    addresses = [(proxy.host, proxy.port) for proxy in proxies]

    def ask(extra_args: dict[str, Any]) -> Client:
        return Client(addresses, body | {"vllm_xargs": extra_args}, timeout_s=DEADLINE_S + CLIENT_GRACE_S)

    scene = Scene(stage, body, ask, folder / "hold")
    try:
        prepare(scene, cell)
        reach(scene, cell.row, cell.column)
    except MISSED as exc:
        return _missed(cell, scene, expected, f"not reached: {exc}")
    fault, held_s, answer = "", 0.0, None
    try:
        injected = inject(scene, cell)
        client = scene.client or scene.start()
        scene.release(injected.frozen)
        client.wait_over()
        answer = client.answer(expected)
        later = _ask_later(scene, right_tokens) if must_be_forgotten(cell) else ""
        injected.finish()
        if answer not in required(cell):
            fault = f"{answer} where {' or '.join(sorted(required(cell)))} is required"
        elif (words := evidence(cell)) and not any(word in client.route + client.told for word in words):
            fault = f"nothing tells of {' or '.join(words)}"
        fault = fault or later
        held_s = stage.wait_nothing_held(stage.nodes)
        fault = fault or stage.defects()
    except MISSED as exc:
        # Whatever failed once the request was there is the mesh's doing: what an injection waits for, it must do.
        fault = fault or f"{type(exc).__name__}: {exc}"
    finally:
        scene.release(None)
    try:
        stage.mend()
    except AssertionError as exc:
        fault = fault or f"not mended: {exc}"
    return _result(cell, scene, answer, held_s, fault)


def _ask_later(scene: Scene, right_tokens: RightTokens) -> str:
    """Ask anew what begins like the request, of the engine whose memory was damaged and of the whole mesh; what is wrong with
    the answers. An error would be no lie.
    """
    assert scene.prefill is not None
    prefill = scene.prefill
    wait_until(lambda: prefill.metric("pdmesh_kv_damaged_blocks_total") > 0, NOTICED_WITHIN_S, "its owner has noticed")
    for number, node in enumerate((prefill, scene.stage.proxies[0])):
        body = scene.body | {"prompt": [*scene.body["prompt"], FIRST_ORDINARY_TOKEN + number]}
        answer = httpx.post(f"{node.url}/v1/completions", json=body | {"return_token_ids": True}, timeout=DEADLINE_S)
        if answer.status_code != OK or answer.json()["choices"][0]["token_ids"] == right_tokens(body):
            continue
        return f"{node.name} answers wrong tokens to a later request that begins alike"
    return ""


def _missed(cell: Cell, scene: Scene, expected: list[int], why: str) -> Result:
    """What a try comes to that did not bring the request to its moment: nothing, unless something broke by itself."""
    answer = scene.client.answer(expected) if scene.client else None
    fault = scene.stage.defects() or (f"{answer} before the fault; {why}" if answer in NEVER_BEFORE else "")
    scene.release(None)
    scene.stage.mend()
    return _result(cell, scene, answer if fault else None, 0.0, fault or why, reached=bool(fault))


def _result(
    cell: Cell, scene: Scene, answer: Answer | None, held_s: float, fault: str, *, reached: bool = True
) -> Result:
    client = scene.client
    return Result(
        cell=cell.name,
        passed=not fault,
        reached=reached,
        answer=answer or "",
        told=client.told[:300] if client else "",
        route=client.route if client else "",
        answer_s=round(client.seconds, 3) if client else 0.0,
        held_s=round(held_s, 3),
        fault=fault,
    )
