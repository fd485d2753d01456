"""What the scheduler wants said and done: deltas and reports for the server, pulls and cancellations for the connectors."""

from dataclasses import dataclass, field

from pdmesh.connector.base import Pull, Push
from pdmesh.engine.conversion import ConvertingPull
from pdmesh.engine.messages import BlocksComputed, NeedsSource, OfferSealed, TransferEnded
from pdmesh.engine.push_messages import LandingReport, PushExpected, PushReport
from pdmesh.protocol.messages import ChoiceDelta


@dataclass(slots=True)
class Outbox:
    """Filled by the scheduler, emptied by the core after each step and each message."""

    deltas: list[ChoiceDelta] = field(default_factory=list)
    sealed: list[OfferSealed] = field(default_factory=list)
    transfers: list[TransferEnded] = field(default_factory=list)
    computed: list[BlocksComputed] = field(default_factory=list)
    needs: list[NeedsSource] = field(default_factory=list)
    pushes: list[PushReport] = field(default_factory=list)
    landings: list[LandingReport] = field(default_factory=list)
    expected: list[PushExpected] = field(default_factory=list)
    """For the server when no step under way can write into the blocks any more."""
    pulls: list[Pull | ConvertingPull] = field(default_factory=list)
    writes: list[Push] = field(default_factory=list)
    cancels: list[str] = field(default_factory=list)
    """Transfer ids."""

    @property
    def has_reports(self) -> bool:
        """Whether there is anything for the server."""
        reports = self.deltas, self.sealed, self.transfers, self.computed, self.needs, self.pushes, self.landings
        return any(reports)
