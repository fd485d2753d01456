"""Finds stop strings in text that arrives in pieces, and holds back what may be the beginning of one.

A Knuth-Morris-Pratt automaton per string: each character is looked at once, and the longest held suffix is the furthest
state. The result does not depend on how the text was cut: the stop string that is complete first wins, of those complete
at the same character the longest.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Scanned:
    """Text that may go out now and the stop string that ends it, if one is complete."""

    text: str
    stop: str | None = None


class StopStrings:
    """A request's stop strings and their automata; made once and shared by all of its choices."""

    def __init__(self, stops: list[str]) -> None:
        # Longest first, so that the first one found at a character is the one to cut at.
        self.automata = tuple((stop, _failures(stop)) for stop in sorted(set(stops), key=len, reverse=True))


class StopScanner:
    """One choice's search; `include` keeps the stop string in the text."""

    def __init__(self, stops: StopStrings, include: bool) -> None:
        self._automata = stops.automata
        self._states = [0] * len(self._automata)
        self._include = include
        self._held = ""

    def push(self, text: str, armed: bool = True) -> Scanned:
        """Take more text. While not `armed` (min_tokens) nothing is searched or held."""
        if not self._automata:
            return Scanned(text)
        if not armed:
            return Scanned(self.flush() + text)
        buffer = self._held + text
        for position in range(len(self._held), len(buffer)):
            stop = self._advance(buffer[position])
            if stop is not None:
                end = position + 1
                self._held = ""
                return Scanned(buffer[: end if self._include else end - len(stop)], stop)
        num_held = max(self._states)
        self._held = buffer[len(buffer) - num_held :]
        return Scanned(buffer[: len(buffer) - num_held])

    def flush(self) -> str:
        """Return what is held; the choice ended otherwise."""
        held, self._held = self._held, ""
        self._states = [0] * len(self._automata)
        return held

    def _advance(self, char: str) -> str | None:
        found = None
        for index, (stop, failures) in enumerate(self._automata):
            state = self._states[index]
            while state and stop[state] != char:
                state = failures[state - 1]
            if stop[state] == char:
                state += 1
            if state == len(stop):
                found = found or stop
                state = failures[state - 1]
            self._states[index] = state
        return found


def _failures(stop: str) -> list[int]:
    """For each prefix, the length of its longest proper suffix that is a prefix too."""
    table = [0] * len(stop)
    length = 0
    for index in range(1, len(stop)):
        while length and stop[index] != stop[length]:
            length = table[length - 1]
        if stop[index] == stop[length]:
            length += 1
        table[index] = length
    return table
