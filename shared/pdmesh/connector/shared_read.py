"""One read that two agents do together, each in a thread of its own: whoever is free takes the next step.

Steps and not halves, so that a thread that gets no CPU does not keep the other waiting; and so that what a step has brought
can be summed by the same thread while it is in the cache: 67 MB were copied and summed by one thread in 17 ms where the copy
alone took 15, and a third thread that summed beside the two that copy cost them 6.
"""

from dataclasses import dataclass

from pdmesh.connector.native_agent import Arrived, CopyState, NativeAgent, Ranges

STEP_BYTES = 3 << 20
"""At most, where blocks are smaller: a read costs 8 µs besides the copy, and the last step is waited for by the other thread."""
LEAST_STEPS = 4


@dataclass(slots=True)
class Part:
    """What one of the two agents has begun of a copy."""

    agent: NativeAgent
    handle: int
    state: CopyState = CopyState.RUNNING
    """As last seen. An agent is not asked again about what has ended."""

    def seen(self) -> CopyState:
        """Ask how it is doing."""
        if self.state is CopyState.RUNNING:
            self.state = self.agent.state(self.handle)
        return self.state


class SharedRead:
    """The steps of a read, and what came of those that have not ended well yet."""

    def __init__(self, local: Ranges, remote: Ranges, arrived: Arrived) -> None:
        self.parts: list[Part] = []
        """Steps that were begun and not done at once."""
        self.failures: list[Exception] = []
        """Of steps that could not be begun, or of what was done after them."""
        self._local, self._remote, self._arrived = local, remote, arrived
        num_bytes = int(local[:, 1].sum())
        num_steps = max(LEAST_STEPS, -(-num_bytes // STEP_BYTES))
        self._size = max(1, len(local) // num_steps)
        # One for both threads: to take the next is a single step of the interpreter.
        self._begins = iter(range(0, len(local), self._size))

    def run(self, agent: NativeAgent, peer: str) -> None:
        """Take steps until there are none or one has failed; in both threads at once, never raises."""
        try:
            for begin in self._begins:
                if not self._is_done(agent, peer, begin):
                    break
        except Exception as exc:  # any of the library's classes
            self.failures.append(exc)
            self._stop()

    def _is_done(self, agent: NativeAgent, peer: str, begin: int) -> bool:
        """Do one step; whether there is to be another."""
        end = min(begin + self._size, len(self._local))
        part = Part(agent, agent.read(self._local[begin:end], self._remote[begin:end], peer))
        state = part.seen()
        if state is CopyState.DONE:
            agent.release(part.handle)
            self._arrived(begin, end)
            return True
        self.parts.append(part)
        if state is not CopyState.RUNNING:
            self._stop()
        return state is CopyState.RUNNING

    def _stop(self) -> None:
        """See that the other thread takes no more steps."""
        for _ in self._begins:
            pass
