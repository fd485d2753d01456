"""A planned step, on its way from the scheduler to the worker and back."""

from dataclasses import dataclass, field

from pdmesh.engine.plan import StepPlan
from pdmesh.engine.request import Sequence


@dataclass(slots=True)
class Schedule:
    """A planned step, and whose its rows are."""

    plan: StepPlan = field(default_factory=StepPlan)
    sequences: list[Sequence] = field(default_factory=list)
    num_free: int = -1
    """Blocks that were free when it had been planned; -1: nobody may be added to it."""
    has_ended: bool = False

    def add(self, sequence: Sequence, start: int, count: int) -> None:
        """Let a running sequence compute `count` tokens from `start` on, and sample when these reach its last."""
        plan = self.plan
        sequence.num_planned = start + count
        sequence.num_in_flight += 1
        is_sampled = sequence.num_planned == sequence.num_wanted and sequence.request.sampling.max_tokens > 0
        sequence.num_wanted += is_sampled
        self.sequences.append(sequence)
        plan.rows.append(sequence.row)
        plan.starts.append(start)
        plan.counts.append(count)
        plan.samples.append(is_sampled)

    def end(self) -> None:
        """Note that no worker computes it any more; repeating it changes nothing.

        For all its rows at once, before any is looked at: whoever is counted twice would seem to be in no step while one
        that writes to its blocks is under way.
        """
        if not self.has_ended:
            self.has_ended = True
            for sequence in self.sequences:
                sequence.num_in_flight -= 1

    @property
    def num_tokens(self) -> int:
        return sum(self.plan.counts)

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to do for the worker."""
        return not self.sequences and not self.plan.copies

    def drop_ended(self) -> None:
        """Take out the rows of sequences that have ended since they were planned."""
        kept = [index for index, sequence in enumerate(self.sequences) if not sequence.is_finished]
        self.sequences = [self.sequences[index] for index in kept]
        plan = self.plan
        plan.rows, plan.starts, plan.counts = (
            [column[index] for index in kept] for column in (plan.rows, plan.starts, plan.counts)
        )
        plan.samples = [plan.samples[index] for index in kept]
