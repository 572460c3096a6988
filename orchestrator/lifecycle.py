"""A job's states and the transitions that are allowed. Pure.

Promises: ``TRANSITIONS`` is the whole truth; what is not in it raises
``TransitionRefused`` with the transitions that were possible.
"""

from __future__ import annotations

from enum import Enum


class JobState(Enum):
    """Where a job stands. ``terminal``: nothing follows; ``holds_nodes``: it owns a node group."""

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
    ERROR = "error"
    CAN_NEVER_FIT = "can never fit"
    CANCEL_ASKED = "cancel asked"
    ENDED = "ranks ended"
    RESUME_ASKED = "resume asked"


TRANSITIONS: dict[tuple[JobState, Cause], JobState] = {}
