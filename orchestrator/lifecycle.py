"""A job's states and the transitions that are allowed. Pure.

Promises: ``TRANSITIONS`` is the whole truth; what is not in it raises
``TransitionRefused`` with the transitions that were possible.
"""

from __future__ import annotations

from enum import Enum

LONGEST_STOP_S = 720.0
"""Seconds after which a stop is over, its last checkpoint and the end by force included, unless
the job's checkpoints take longer: its ``stopping`` event says how long then."""
AFTER_STOP_S = 90.0
"""Seconds beside those that a job said its stop may take: the end by force, and its nodes' return.
"""


class JobState(Enum):
    """Where a job stands. ``terminal``: it ended; ``holds_nodes``: it owns a node group."""

    QUEUED = ("queued", False, False)
    STARTING = ("starting", False, True)
    RUNNING = ("running", False, True)
    RECOVERING = ("recovering", False, True)
    PAUSED = ("paused", False, False)
    CANCELLING = ("cancelling", False, True)
    SUCCEEDED = ("succeeded", True, False)
    FAILED = ("failed", True, False)
    CANCELLED = ("cancelled", True, False)

    def __init__(self, word: str, terminal: bool, holds_nodes: bool) -> None:
        self.word = word
        self.terminal = terminal
        self.holds_nodes = holds_nodes


class Cause(Enum):
    """Why a job changed its state."""

    NODES_GRANTED = "nodes granted"
    FIRST_STEP = "first step done"
    INCIDENT = "incident"
    RECOVERED = "recovered"
    RANK_LOST = "rank lost"
    SUPERVISOR_LOST = "supervisor lost"
    STEPS_DONE = "all steps done"
    BUDGET_SPENT = "recovery budget spent"
    STATE_GONE = "saved state gone"
    ERROR = "error"
    CAN_NEVER_FIT = "can never fit"
    CANCEL_ASKED = "cancel asked"
    ENDED = "ranks ended"
    RESUME_ASKED = "resume asked"
    PAUSE_ASKED = "pause asked"
    PREEMPTED = "preempted"
    CONTROL_ASKED = "way back asked"


def _transitions() -> dict[tuple[JobState, Cause], JobState]:
    q, st, ru, re_, pa, ca = (
        JobState.QUEUED,
        JobState.STARTING,
        JobState.RUNNING,
        JobState.RECOVERING,
        JobState.PAUSED,
        JobState.CANCELLING,
    )
    table = {
        (q, Cause.NODES_GRANTED): st,
        (q, Cause.CAN_NEVER_FIT): JobState.FAILED,
        (q, Cause.ERROR): JobState.FAILED,
        (q, Cause.CANCEL_ASKED): JobState.CANCELLED,
        (st, Cause.FIRST_STEP): ru,
        (re_, Cause.FIRST_STEP): ru,
        (re_, Cause.RECOVERED): ru,
        (q, Cause.PAUSE_ASKED): pa,
        (pa, Cause.RESUME_ASKED): q,
        (pa, Cause.CANCEL_ASKED): JobState.CANCELLED,
        # What it saved is kept, so a person may change their mind.
        (JobState.CANCELLED, Cause.RESUME_ASKED): q,
        (JobState.FAILED, Cause.RESUME_ASKED): q,
    }
    for state in (st, ru, re_):
        table |= {
            (state, Cause.INCIDENT): re_,
            (state, Cause.RANK_LOST): re_,
            (state, Cause.SUPERVISOR_LOST): re_,
            (state, Cause.STEPS_DONE): JobState.SUCCEEDED,
            # `recovery.on_exhausted: fail` ends with ERROR instead.
            (state, Cause.BUDGET_SPENT): pa,
            # What was saved can't be had: a person puts it back, or begins anew.
            (state, Cause.STATE_GONE): pa,
            (state, Cause.PAUSE_ASKED): pa,
            # Its nodes are another job's now; it goes on where it was once it has some again.
            (state, Cause.PREEMPTED): q,
            (state, Cause.CONTROL_ASKED): re_,
            (state, Cause.ERROR): JobState.FAILED,
            (state, Cause.CANCEL_ASKED): ca,
        }
    # What a supervisor says while it doesn't know yet that the job is being cancelled
    # changes nothing; whatever ends the ranks ends the job as asked.
    for cause in (
        Cause.FIRST_STEP,
        Cause.INCIDENT,
        Cause.RECOVERED,
        Cause.RANK_LOST,
        Cause.CONTROL_ASKED,
    ):
        table[ca, cause] = ca
    for cause in (
        Cause.ENDED,
        Cause.ERROR,
        Cause.SUPERVISOR_LOST,
        Cause.BUDGET_SPENT,
        Cause.STATE_GONE,
        Cause.PAUSE_ASKED,
        Cause.PREEMPTED,
    ):
        table[ca, cause] = JobState.CANCELLED
    table[ca, Cause.STEPS_DONE] = JobState.SUCCEEDED
    return table


TRANSITIONS: dict[tuple[JobState, Cause], JobState] = _transitions()
"""(state, cause) → the state that follows; all there is."""


class TransitionRefused(ValueError):  # noqa: N818
    """A state doesn't change for this cause; carries what could have happened."""

    def __init__(self, state: JobState, cause: Cause, wanted: JobState | None = None) -> None:
        # All arguments go to Exception, so that it survives pickling.
        super().__init__(state, cause, wanted)
        self.state = state
        self.cause = cause
        self.wanted = wanted

    def __str__(self) -> str:
        if self.state.terminal:
            again = ", only resume does" if possible_from(self.state) else ""
            return f"the job is {self.state.word}: {self.cause.value!r} changes nothing{again}"
        possible = ", ".join(
            f"{cause.value} → {after.word}" for cause, after in possible_from(self.state).items()
        )
        towards = f" to {self.wanted.word}" if self.wanted else ""
        return (
            f"a {self.state.word} job doesn't change{towards} on {self.cause.value!r}; "
            f"possible: {possible}"
        )


def nothing_to_do(job: str, refused: TransitionRefused) -> str:
    """Why a cancel or resume of ``job`` was refused, in a sentence for whoever asked."""
    state = refused.state
    if refused.cause is Cause.CANCEL_ASKED:
        been = "was cancelled" if state is JobState.CANCELLED else f"has {state.word}"
        return f"{job} {been} already; there is nothing to cancel"
    if refused.cause is not Cause.RESUME_ASKED:
        return str(refused)
    if state is JobState.SUCCEEDED:
        return f"{job} has succeeded already; there is nothing to resume"
    if state is JobState.CANCELLING:
        return f"{job} is being cancelled; resume it once it has ended"
    goes_on = "waits for its nodes" if state is JobState.QUEUED else f"is {state.word}"
    return f"{job} {goes_on} already; only a paused, cancelled or failed job is resumed"


def possible_from(state: JobState) -> dict[Cause, JobState]:
    """The causes that change ``state``, and to what."""
    return {cause: after for (before, cause), after in TRANSITIONS.items() if before is state}


def next_state(state: JobState, cause: Cause) -> JobState:
    """The state after ``cause``; ``TransitionRefused`` if there is none."""
    try:
        return TRANSITIONS[state, cause]
    except KeyError:
        raise TransitionRefused(state, cause) from None


def state_named(word: str) -> JobState:
    """The state stored as ``word``."""
    for state in JobState:
        if state.word == word:
            return state
    raise ValueError(f"no job state is called {word!r}")
