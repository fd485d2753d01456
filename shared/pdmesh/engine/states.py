"""The life of one sequence as a table: (state, event) -> state. An event that is not in the table is a bug of ours, and ends
the request it happened to, not the engine."""

from enum import Enum


class State(Enum):
    """Where a sequence is."""

    HELD = "held"
    """A choice that does not compete for the batch yet: the one before it computes the prompt."""
    WAITING = "waiting"
    WAITING_FOR_GRAMMAR = "waiting_for_grammar"
    WAITING_FOR_REMOTE_KVS = "waiting_for_remote_kvs"
    WAITING_FOR_SOURCE = "waiting_for_source"
    """Preempted, while the server looks for its KV elsewhere."""
    RUNNING = "running"
    PREEMPTED = "preempted"
    """Waiting again, its blocks taken away."""
    FINISHED_STOPPED = "finished_stopped"
    FINISHED_LENGTH = "finished_length"
    FINISHED_ABORTED = "finished_aborted"
    FINISHED_ERROR = "finished_error"
    FINISHED_IGNORED = "finished_ignored"
    """Resumed behind its last token: there was nothing to compute."""
    FINISHED_REPETITION = "finished_repetition"
    FINISHED_HANDED_OFF = "finished_handed_off"
    """A prefill-only choice after its first token: it goes on elsewhere."""


class Event(Enum):
    """What happens to a sequence."""

    FREED = "freed"
    GRAMMAR_STARTED = "grammar_started"
    GRAMMAR_READY = "grammar_ready"
    SOURCE_ASKED = "source_asked"
    SOURCE_ANSWERED = "source_answered"
    PULL_STARTED = "pull_started"
    PULL_SUCCEEDED = "pull_succeeded"
    PULL_FAILED = "pull_failed"
    ADMITTED = "admitted"
    PREEMPTED = "preempted"
    STOPPED = "stopped"
    LENGTH_REACHED = "length_reached"
    REPEATED = "repeated"
    HANDED_OFF = "handed_off"
    IGNORED = "ignored"
    ABORTED = "aborted"
    FAILED = "failed"


_LIVE = (
    State.HELD,
    State.WAITING,
    State.WAITING_FOR_GRAMMAR,
    State.WAITING_FOR_REMOTE_KVS,
    State.WAITING_FOR_SOURCE,
    State.RUNNING,
    State.PREEMPTED,
)
# A step that was under way when its sequence was preempted still brings that one's token, which may be its last.
_STEPPING = (State.RUNNING, State.PREEMPTED)

TRANSITIONS: dict[tuple[State, Event], State] = {
    (State.HELD, Event.FREED): State.WAITING,
    (State.WAITING, Event.GRAMMAR_STARTED): State.WAITING_FOR_GRAMMAR,
    (State.WAITING_FOR_GRAMMAR, Event.GRAMMAR_READY): State.WAITING,
    (State.WAITING, Event.PULL_STARTED): State.WAITING_FOR_REMOTE_KVS,
    (State.PREEMPTED, Event.SOURCE_ASKED): State.WAITING_FOR_SOURCE,
    # The pull from the source before failed.
    (State.WAITING, Event.SOURCE_ASKED): State.WAITING_FOR_SOURCE,
    (State.WAITING_FOR_SOURCE, Event.SOURCE_ANSWERED): State.PREEMPTED,
    (State.PREEMPTED, Event.PULL_STARTED): State.WAITING_FOR_REMOTE_KVS,
    (State.WAITING_FOR_REMOTE_KVS, Event.PULL_SUCCEEDED): State.WAITING,
    (State.WAITING_FOR_REMOTE_KVS, Event.PULL_FAILED): State.WAITING,
    (State.WAITING, Event.ADMITTED): State.RUNNING,
    (State.PREEMPTED, Event.ADMITTED): State.RUNNING,
    (State.RUNNING, Event.PREEMPTED): State.PREEMPTED,
    # Fetched KV may be taken back before its sequence ever ran.
    (State.WAITING, Event.PREEMPTED): State.PREEMPTED,
    (State.HELD, Event.IGNORED): State.FINISHED_IGNORED,
    (State.WAITING, Event.IGNORED): State.FINISHED_IGNORED,
    **{(state, Event.STOPPED): State.FINISHED_STOPPED for state in _STEPPING},
    **{(state, Event.LENGTH_REACHED): State.FINISHED_LENGTH for state in _STEPPING},
    **{(state, Event.REPEATED): State.FINISHED_REPETITION for state in _STEPPING},
    **{(state, Event.HANDED_OFF): State.FINISHED_HANDED_OFF for state in _STEPPING},
    **{(state, Event.ABORTED): State.FINISHED_ABORTED for state in _LIVE},
    **{(state, Event.FAILED): State.FINISHED_ERROR for state in _LIVE},
}

FINISH_REASON: dict[State, str] = {
    State.FINISHED_STOPPED: "stop",
    State.FINISHED_LENGTH: "length",
    State.FINISHED_ABORTED: "abort",
    State.FINISHED_ERROR: "error",
    State.FINISHED_IGNORED: "length",
    State.FINISHED_REPETITION: "repetition",
    State.FINISHED_HANDED_OFF: "",
}
"""What `ChoiceDelta.finish_reason` says of each final state."""


class IllegalEvent(Exception):
    """An event that cannot happen to a sequence in its state."""


def after(state: State, event: Event) -> State:
    """Return the next state. Raises IllegalEvent for an event that cannot happen in this one."""
    following = TRANSITIONS.get((state, event))
    if following is None:
        raise IllegalEvent(f"{event.name} cannot happen to a sequence that is {state.name}")
    return following
