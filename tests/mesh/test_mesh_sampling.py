"""A seeded request gives the same tokens wherever and with whomever it runs."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from support.mesh import Mesh

pytestmark = [pytest.mark.mesh, pytest.mark.timeout(300)]

PROMPTS = [
    "The sea was calm that morning and the old captain",
    "A short recipe for bread: first,",
    "In the year 2140 the first city on Mars",
    "Dear Sir or Madam, I am writing to",
]
VARIANTS: list[dict[str, Any]] = [
    {"temperature": 1.0, "seed": 7},
    {"temperature": 0.8, "top_p": 0.9, "seed": 11},
    {"temperature": 1.2, "top_k": 40, "seed": 13, "presence_penalty": 0.7, "frequency_penalty": 0.3},
    {"temperature": 0.9, "min_p": 0.05, "seed": 17, "repetition_penalty": 1.2, "logit_bias": {"28": -5.0}},
]


def test_seeded_tokens_are_the_same_aggregated_disaggregated_alone_and_in_a_batch(
    aggregated: Mesh, shm_mesh: Mesh
) -> None:
    jobs = [(prompt, variant) for prompt in PROMPTS for variant in VARIANTS]

    def ask(running: Mesh, job: tuple[str, dict[str, Any]]) -> list[int]:
        ids: list[int] = running.complete(job[0], max_tokens=12, ignore_eos=True, **job[1])["choices"][0]["token_ids"]
        return ids

    alone = [ask(aggregated, job) for job in jobs]
    assert len({tuple(ids) for ids in alone}) > len(jobs) // 2
    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(lambda job: ask(aggregated, job), jobs)) == alone
        assert list(pool.map(lambda job: ask(shm_mesh, job), jobs)) == alone
    assert ask(shm_mesh, jobs[5]) == alone[5]


def test_choices_share_a_prefill_and_differ(aggregated: Mesh, shm_mesh: Mesh) -> None:
    body: dict[str, Any] = {"n": 4, "temperature": 1.0, "seed": 5, "max_tokens": 10, "ignore_eos": True}
    answers = [running.complete(PROMPTS[0], **body) for running in (aggregated, shm_mesh)]
    texts = [[choice["token_ids"] for choice in answer["choices"]] for answer in answers]
    assert texts[0] == texts[1]
    assert len({tuple(ids) for ids in texts[0]}) == 4
    assert [choice["index"] for choice in answers[1]["choices"]] == [0, 1, 2, 3]
    shm_mesh.wait_nothing_held()
