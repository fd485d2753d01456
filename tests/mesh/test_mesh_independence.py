"""Each service is its own: replicas come and go under load, and a limit of one role is that role's only."""

from __future__ import annotations

import threading
import time

import pytest

from pdmesh.models.source import DEMO_MODEL
from support.mesh import Mesh, Service, mesh

pytestmark = [pytest.mark.mesh, pytest.mark.timeout(300)]


class Load:
    """Clients that ask for short answers without pause until told to stop; every answer is kept."""

    def __init__(self, running: Mesh, num_clients: int) -> None:
        self.failures: list[str] = []
        self.num_done = 0
        self._running = running
        self._stop = threading.Event()
        self._threads = [threading.Thread(target=self._ask, args=(i,)) for i in range(num_clients)]

    def __enter__(self) -> Load:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join(60)

    def wait(self, num_more: int) -> None:
        target, deadline = self.num_done + num_more, time.monotonic() + 60
        while self.num_done < target and not self.failures:
            assert time.monotonic() < deadline
            time.sleep(0.05)

    def _ask(self, client: int) -> None:
        round_ = 0
        while not self._stop.is_set():
            round_ += 1
            try:
                answer = self._running.complete(
                    f"Client {client}, question {round_}: what is", max_tokens=6, ignore_eos=True
                )
                if len(answer["choices"][0]["token_ids"]) != 6:
                    self.failures.append(str(answer))
            except AssertionError as exc:
                self.failures.append(str(exc))
            self.num_done += 1


def generated(engine: Service) -> float:
    return engine.metric("vllm:generation_tokens_total")


@pytest.mark.parametrize("role", ["decode", "prefill"])
def test_scaling_one_two_one_under_load_loses_nothing_and_moves_traffic(role: str) -> None:
    with mesh(DEMO_MODEL) as running, Load(running, 4) as load:
        engines = getattr(running, role)
        load.wait(6)
        running.start_engine(role, "--connector", "shm", "--kv-load-failure-policy", "recompute")
        running.announce()
        running.wait_healthy()
        before = generated(engines[1])
        load.wait(24)
        assert generated(engines[1]) > before, "the new replica got no traffic"

        leaving = engines.pop(0)
        running.announce()
        assert leaving.stop() == 0, leaving.log[-2000:]
        load.wait(12)
        assert not load.failures, load.failures[:3]


def test_a_token_budget_changed_on_one_role_changes_only_that_roles_steps() -> None:
    prompt = list(range(1000, 1300))
    with mesh(DEMO_MODEL, prefill_flags=("--max-num-batched-tokens", "48")) as running:
        running.complete(prompt, max_tokens=4)
        assert running.prefill[0].metric("pdmesh_engine_max_step_tokens") <= 48
        # The same prompt straight to decode is computed in one step there.
        running.complete([7, *prompt], url=running.decode[0].http, max_tokens=1)
        assert running.decode[0].metric("pdmesh_engine_max_step_tokens") > 256
