"""Which prompts decode gets pushed while prefill computes them, and what the proxy owes for it: a withdrawal, on every path."""

from dataclasses import dataclass

from pdmesh.errors import MeshError
from pdmesh.protocol.capabilities import can_push
from pdmesh.protocol.exchange import Exchange
from pdmesh.protocol.pushes import Expectation, new_offer_id
from pdmesh_proxy.engine_session import EngineSession
from pdmesh_proxy.pairs import exchange_of
from pdmesh_proxy.router import Decision, Reason, RequestFacts


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldExpectation:
    """One that an engine was told of. Owned by its request, which withdraws it unless the engine has taken what it expected."""

    offer_id: str
    peer_id: str
    """`engine_id@epoch` of the engine that expects."""
    session: EngineSession

    def withdraw(self) -> None:
        """Nobody will come for it, or somebody has; repeating it changes nothing."""
        self.session.withdraw(self.offer_id)


def pays(facts: RequestFacts, decision: Decision, *, min_chunks: int) -> bool:
    """Whether there is time to push while prefill computes: what it has to compute takes several of its steps."""
    prefill, decode = decision.prefill, decision.decode
    if prefill is None or decode is None or decision.reason is not Reason.DISAGGREGATED:
        return False
    if not can_push(prefill.capabilities, decode.capabilities) or not prefill.max_step_tokens:
        return False
    if exchange_of(prefill, decode) is not Exchange.BYTES:
        # What is converted on its way can only be pulled.
        return False
    return -(-facts.uncached(prefill) // prefill.max_step_tokens) >= min_chunks


def expect(
    session: EngineSession, decision: Decision, token_ids: list[int], *, cache_salt: str, remaining_s: float
) -> HeldExpectation | None:
    """Tell the chosen decode, over its session, what the chosen prefill is about to compute; None when it cannot be told."""
    prefill, decode = decision.prefill, decision.decode
    assert prefill is not None
    assert decode is not None
    held = HeldExpectation(offer_id=new_offer_id(), peer_id=decode.peer_id, session=session)
    try:
        session.expect(
            Expectation(
                offer_id=held.offer_id,
                owner_id=prefill.peer_id,
                owner_address=prefill.address,
                token_ids=token_ids,
                cache_salt=cache_salt,
                remaining_s=remaining_s,
            )
        )
    except MeshError:
        # It has broken since it was chosen: decode is chosen anew when prefill is done.
        return None
    return held
