"""Promise 1: greedy float32 output equals transformers' in every shape of the mesh."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from pdmesh.models.source import DEMO_MODEL
from support.mesh import Mesh, mesh
from support.reference import Continuation, HFReference, prompts

pytestmark = [pytest.mark.mesh, pytest.mark.timeout(900)]

NUM_TOKENS = 10


@pytest.fixture(scope="session")
def reference() -> HFReference:
    return HFReference()


def continuations(reference: HFReference, *, full: bool) -> list[Continuation]:
    """What transformers says; every prompt must have at least one clear token."""
    answers = [reference.greedy(ids, NUM_TOKENS) for ids in prompts(reference, full=full)]
    assert all(answer.output_ids for answer in answers)
    return answers


@pytest.fixture(scope="session")
def expected(reference: HFReference) -> list[Continuation]:
    return continuations(reference, full=False)


@pytest.fixture(scope="session")
def expected_of_all(reference: HFReference) -> list[Continuation]:
    return continuations(reference, full=True)


@pytest.fixture(scope="module", params=["aggregated", "shm", "nixl"])
def connector(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module", params=[64, 2048])
def running(request: pytest.FixtureRequest, connector: str) -> Iterator[Mesh]:
    """A float32 mesh with this connector and chunk size."""
    flags = ("--dtype", "float32", "--max-num-batched-tokens", str(request.param))
    if connector == "aggregated":
        with mesh(DEMO_MODEL, prefill=0, engine_flags=flags) as mesh_:
            yield mesh_
    else:
        with mesh(DEMO_MODEL, connector=connector, engine_flags=flags) as mesh_:
            yield mesh_


def test_greedy_equals_transformers(running: Mesh, connector: str, expected: list[Continuation]) -> None:
    check(running, connector, expected)


@pytest.mark.full
def test_greedy_equals_transformers_for_thirty_prompts(
    running: Mesh, connector: str, expected_of_all: list[Continuation]
) -> None:
    assert len(expected_of_all) >= 30
    check(running, connector, expected_of_all)


def check(running: Mesh, connector: str, expected: list[Continuation]) -> None:
    """Each prompt cold, again with its prefix cached, then all of them with eight in flight."""
    for attempt in ("cold", "prefix hit"):
        for want in expected:
            got = running.complete(want.prompt_ids, max_tokens=len(want.output_ids), ignore_eos=True)
            assert got["choices"][0]["token_ids"] == want.output_ids, (attempt, len(want.prompt_ids))
            if attempt == "prefix hit" and len(want.prompt_ids) > 33:
                assert got["usage"]["prompt_tokens_details"]["cached_tokens"] >= 32
            assert_kv_moved(got["headers"]["x-pdmesh-route"], connector, max_tokens=len(want.output_ids))

    def ask(want: Continuation) -> list[int]:
        answer = running.complete(want.prompt_ids, max_tokens=len(want.output_ids), ignore_eos=True)
        ids: list[int] = answer["choices"][0]["token_ids"]
        return ids

    with ThreadPoolExecutor(8) as pool:
        together = list(pool.map(ask, expected))
    assert together == [want.output_ids for want in expected]
    running.wait_nothing_held()


def assert_kv_moved(route: str, connector: str, max_tokens: int) -> None:
    """The debug header tells that KV moved over the connector under test (or did not have to)."""
    fields = dict(part.strip().split("=", 1) for part in route.split(";"))
    if connector == "aggregated":
        assert fields["prefill"] == ""
        assert fields["decode"]
    elif max_tokens > 1:
        assert fields["prefill"]
        assert fields["decode"]
        # A decode that already holds the whole prompt in its own prefix cache has nothing to pull.
        assert fields["kv"] in (connector, "prefix"), route
        assert int(fields["kv_bytes"]) > 0 or fields["kv"] == "prefix"
