"""Requests as a test describes them, and what their clients are told."""

from dataclasses import dataclass

from pdmesh.engine.block_key import block_keys, root_key
from pdmesh.engine.kv_groups import KVGroup
from pdmesh.engine.messages import AddRequest
from pdmesh.protocol.messages import ChoiceDelta, GenerateRequest, GroupBlocks, KVSource, SamplingParams
from support.plan_worker import EOS, Script, prompt_logprobs_at

BLOCK_SIZE = 4
ROOT = root_key("model", "layout", 0)
# A source's block ids tell the group and the place in the sequence.
BLOCKS_PER_GROUP = 1000


@dataclass(frozen=True, kw_only=True)
class Wish:
    prompt: list[int]
    n: int = 1
    max_tokens: int = 4
    emitted: int = 0
    priority: int = 0
    salt: str = ""
    eos_at: int = -1
    nan_at: int = -1
    prefill_only: bool = False
    has_offer: bool = False
    prompt_logprobs: bool = False
    logprobs: bool = False
    source: str = ""
    """"", peer, tier, stock or broken."""
    fail_policy: str = "recompute"

    def script(self, number: int, era: int) -> Script:
        return Script(
            number=number,
            prompt=self.prompt,
            salt=self.salt,
            max_tokens=self.max_tokens,
            eos_at=self.eos_at,
            nan_at=self.nan_at,
            era=era,
        )


@dataclass
class Told:
    """What a client has been told of one choice."""

    wish: Wish
    script: Script
    choice: int
    tokens: list[int]
    """Prompt, emitted, and what came in deltas."""
    num_first: int
    has_first: bool = False

    def take(self, delta: ChoiceDelta, *, max_model_len: int, has_crashed: bool) -> None:
        """Assert that a delta is what may come next."""
        wish, script = self.wish, self.script
        for token in delta.token_ids:
            assert len(self.tokens) == self.num_first or self.tokens[-1] != EOS, "a token after EOS"
            assert token == script.token(self.choice, self.tokens), (
                f"not the next token of r{script.number}/{self.choice}"
            )
            self.tokens.append(token)
        assert len(delta.logprobs) == (len(delta.token_ids) if wish.logprobs else 0)
        assert [each.token_ids[0] for each in delta.logprobs] in ([], delta.token_ids)
        if not self.has_first and wish.prompt_logprobs and self.choice == 0 and not wish.emitted:
            if delta.finish_reason not in ("abort", "error"):
                expected = [prompt_logprobs_at(wish.prompt, place) for place in range(1, len(wish.prompt))]
                assert delta.prompt_logprobs == [None, *expected]
        else:
            assert delta.prompt_logprobs is None
        self.has_first = True
        self._check_end(delta, max_model_len, has_crashed=has_crashed)

    def _check_end(self, delta: ChoiceDelta, max_model_len: int, *, has_crashed: bool) -> None:
        num_output = len(self.tokens) - len(self.wish.prompt)
        assert num_output <= self.wish.max_tokens
        match delta.finish_reason:
            case "stop":
                assert self.tokens[-1] == EOS
            case "length":
                assert num_output >= min(self.wish.max_tokens, max_model_len - len(self.wish.prompt))
            case "error" if delta.error_code == "EngineFault":
                assert has_crashed or num_output == self.wish.nan_at
            case "error" if delta.error_code == "TransferFailed":
                assert self.wish.source
                assert self.wish.fail_policy == "fail"
            case "error":
                assert delta.error_code in ("Overloaded", "InvalidRequest")
                assert not num_output - self.wish.emitted, "refused, but begun"
            case "":
                assert delta.token_ids


def continued(script: Script, choice: int, count: int) -> list[int]:
    """Return the first `count` tokens of a choice's output."""
    tokens = list(script.prompt)
    for _ in range(count):
        tokens.append(script.token(choice, tokens))
    return tokens[len(script.prompt) :]


def add_request(wish: Wish, script: Script, groups: list[KVGroup]) -> AddRequest:
    """Make the message that brings a wish to the engine."""
    number, request_id = script.number, f"r{script.number}"
    return AddRequest(
        request=GenerateRequest(
            request_id=request_id,
            token_ids=wish.prompt,
            sampling=SamplingParams(
                n=wish.n,
                seed=number,
                max_tokens=wish.max_tokens,
                prompt_logprobs=0 if wish.prompt_logprobs else None,
                logprobs=0 if wish.logprobs else None,
            ),
            choices=list(range(wish.n)),
            emitted=[continued(script, choice, wish.emitted) for choice in range(wish.n)] if wish.emitted else [],
            prefill_only=wish.prefill_only,
            cache_salt=wish.salt,
            priority=wish.priority,
        ),
        offer_id=f"offer-{request_id}" if wish.has_offer else "",
        source=_source_of(request_id, wish, groups),
        recompute_last=wish.source == "stock",
        store_to_tier=wish.has_offer,
        may_refetch=True,
        # The server sends them or does not.
        block_keys=block_keys(wish.prompt, BLOCK_SIZE, root=ROOT, cache_salt=wish.salt) if number % 2 else [],
    )


def _source_of(request_id: str, wish: Wish, groups: list[KVGroup]) -> KVSource | None:
    if not wish.source:
        return None
    length = len(wish.prompt)
    num_tokens = length // BLOCK_SIZE * BLOCK_SIZE if wish.source == "tier" else length
    return make_source(
        f"t-{request_id}", groups, num_tokens, num_extra=wish.source == "broken", fail_policy=wish.fail_policy
    )


def make_source(
    transfer_id: str, groups: list[KVGroup], num_tokens: int, *, num_extra: int, fail_policy: str
) -> KVSource | None:
    """Make a source of a sequence's first tokens, with more blocks than these have where it is to be broken."""
    num_blocks = -(-num_tokens // BLOCK_SIZE) + num_extra
    if num_blocks == 0:
        return None
    blocks = []
    for group, rule in enumerate(groups):
        first = rule.first_needed(num_tokens - 1)
        ids = [group * BLOCKS_PER_GROUP + place for place in range(first, num_blocks)]
        blocks.append(GroupBlocks(group=group, block_ids=ids, generations=[1] * len(ids), first_block=first))
    return KVSource(
        transfer_id=transfer_id,
        peer_id="p@1",
        groups=blocks,
        num_tokens=num_tokens,
        fail_policy=fail_policy,
        offer_id="theirs",
    )
