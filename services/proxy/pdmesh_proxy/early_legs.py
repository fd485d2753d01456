"""Decode legs that are sent together with the prefill leg: decode hears from prefill itself when it may go on.

So a handoff takes one message between two engines, and not the way over the proxy. An early leg is never needed: the ticket comes
all the same, and a request whose early leg has failed is routed as if there had been none.
"""

from dataclasses import dataclass
from enum import StrEnum

from pdmesh.protocol.capabilities import can_await
from pdmesh_proxy.endpoint import Endpoint
from pdmesh_proxy.engine_session import EngineSession
from pdmesh_proxy.router import Decision, Reason, RequestFacts
from pdmesh_proxy.stream import Leg
from pdmesh_proxy.view import EngineView


class EarlyEnd(StrEnum):
    """What became of an early leg."""

    USED = "used"
    UNNEEDED = "unneeded"
    """No token was left to decode, prefill failed, or the client left."""
    FAILED = "failed"
    """Decode was asked anew, with the ticket; also counted for one that had been used by then."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EarlyLeg:
    """One that was sent. Owned by its request, which closes it or goes on with it."""

    engine: EngineView
    endpoint: Endpoint
    session: EngineSession
    leg: Leg

    def close(self) -> None:
        """Nobody goes on with it; repeating it changes nothing."""
        self.leg.close()


def may_go_early(facts: RequestFacts, decision: Decision, *, num_choices: int) -> bool:
    """Whether decode can be told before prefill has begun: not for what is resumed, as it goes on behind more than a token."""
    prefill, decode = decision.prefill, decision.decode
    if prefill is None or decode is None or decision.reason is not Reason.DISAGGREGATED:
        return False
    return num_choices == 1 and not facts.started and can_await(prefill.capabilities, decode.capabilities)
