"""State that a choice's tokens tell is the same wherever the next token is computed: a toy automaton allows a few tokens at each
step, and what it allows depends on all tokens before. Handed over, preempted and resumed at every position it gives the same.
"""

from __future__ import annotations

import torch

from pdmesh.connector.shm import ShmConnector
from pdmesh.engine.logits_processors import LogitsProcessor, RowView
from pdmesh.engine.messages import SetSource
from pdmesh.protocol.messages import KVSource
from pdmesh.security import MeshSecret
from support.core_harness import CoreHarness
from support.fake_backend import VOCAB_SIZE

SECRET = MeshSecret("x" * 32)
PROMPT = [2 + (7 * index) % 50 for index in range(11)]
NUM_TOKENS = 14
OPTIONS: dict[str, object] = {
    "temperature": 0.9,
    "seed": 3,
    "max_tokens": NUM_TOKENS,
    "repetition_penalty": 1.2,
    "logprobs": 1,
}
NUM_STATES = 7


class Automaton(LogitsProcessor):
    """In state s only tokens of one class may come; each leads to another state. One that forgot a token goes astray at once."""

    def apply(self, logits_V: torch.Tensor, row: RowView) -> None:
        state = 0
        for token in row.output.tolist():
            assert token % NUM_STATES == state, "a token that the automaton does not allow"
            state = (3 * state + token // NUM_STATES + 1) % NUM_STATES
        is_allowed = torch.arange(self.vocab_size) % NUM_STATES == state
        logits_V[~is_allowed] = -torch.inf


def make_core(peer_id: str = "e@1", **options: object) -> CoreHarness:
    return CoreHarness(
        connectors={"shm": ShmConnector(peer_id, SECRET)},
        processors=[Automaton(VOCAB_SIZE, torch.device("cpu"))],
        **options,  # type: ignore[arg-type]
    )


def whole() -> list[int]:
    core = make_core()
    core.add(PROMPT, **OPTIONS)
    core.run()
    tokens = core.tokens()
    core.close()
    assert len(tokens) == NUM_TOKENS
    assert len(set(tokens)) > 3
    return tokens


def offered(owner: CoreHarness, tokens: list[int], transfer_id: str) -> KVSource:
    """Have `owner` compute the prompt and `tokens`, sample the next one, and offer the KV."""
    offer_id = f"offer-{transfer_id}"
    before = {"emitted": [tokens]} if tokens else {}
    owner.add(PROMPT, transfer_id, prefill_only=True, offer_id=offer_id, **before, **OPTIONS)
    owner.run()
    [sealed] = [each for each in owner.sealed if each.offer_id == offer_id]
    return KVSource(transfer_id=transfer_id, peer_id="p@1", groups=sealed.groups, num_tokens=sealed.num_tokens)


def test_handed_over_at_every_position() -> None:
    tokens = whole()
    owner, decode = make_core("p@1"), make_core("d@1")
    decode.reach(owner, "p@1")
    for position in range(NUM_TOKENS - 1):
        source = offered(owner, tokens[:position], f"t{position}")
        assert owner.tokens(f"t{position}") == tokens[position : position + 1]
        decode.add(PROMPT, f"r{position}", source=source, emitted=[tokens[: position + 1]], **OPTIONS)
        decode.run()
        assert decode.tokens(f"r{position}") == tokens[position + 1 :]
        decode.scheduler.reset_prefix_cache()
        owner.scheduler.release_offer(f"offer-t{position}")


def test_resumed_at_every_position() -> None:
    tokens = whole()
    core = make_core()
    for position in range(1, NUM_TOKENS):
        core.add(PROMPT, f"r{position}", emitted=[tokens[:position]], **OPTIONS)
        core.run()
        assert core.tokens(f"r{position}") == tokens[position:]


def test_preempted_at_every_position_and_fetched_again() -> None:
    """Another request makes it come back with the prompt's KV from its prefill, and the rest computed."""
    tokens = whole()
    owner = make_core("p@1")
    for position in range(1, NUM_TOKENS):
        core = make_core(f"d{position}@1", refetch_min_tokens=1)
        core.reach(owner, "p@1")
        core.add(PROMPT, may_refetch=True, **OPTIONS)
        for message in core._inbox.drain():
            core._core._handle(message)
        while len(core.scheduler.state.requests["r"].lead.tokens) < len(PROMPT) + position:
            core.step()
        core.scheduler.state.preempt(core.scheduler.state.running[0])
        core.scheduler.reset_prefix_cache()
        core.run()
        [need] = [each for output in core.outputs for each in output.needs]
        source = offered(owner, [], f"p{position}")
        core.run(SetSource(request_id=need.request_id, choice=need.choice, source=source, kind="offer"))
        assert core.tokens() == tokens
        assert [each.kv_source for each in core.deltas_of() if "preempted" in each.kv_source] == ["preempted:offer"]
        owner.scheduler.release_offer(f"offer-p{position}")
        core.close()
