"""Ways back that no step has followed yet, told as one recovery. Pure.

A rank may die while another is being replaced, and a supervisor while it replaces ranks:
what began before the first new step is one recovery, counted from its first trouble.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from orchestrator.actions import Action
from orchestrator.protocol import ResumeState
from orchestrator.recovery.restart_budget import is_restart


@dataclass(frozen=True, slots=True)
class WayBack:
    """Rollbacks and restarts on the way to the next step."""

    actions: tuple[Action, ...]
    detected: float
    """When the first trouble was."""
    recorded: int
    """Newest step recorded when it began."""

    @property
    def words(self) -> str:
        """The kinds of its actions, once each, as ``layer_fallback and restart``."""
        return " and ".join(dict.fromkeys(action.kind for action in self.actions))

    def elsewhere(self) -> WayBack:
        """The same, by another attempt: the ranks could not take it."""
        return replace(self, actions=tuple(replace(a, in_place=False) for a in self.actions))

    def steps_lost(self, step: int) -> int:
        """Recorded steps whose work is done again once ``step`` follows."""
        return max(0, self.recorded + 1 - step)


def joined(way: WayBack | None, action: Action, recorded: int) -> WayBack:
    """``action`` as a way back of its own, or as more of the one that goes on."""
    if way is None:
        return WayBack((action,), _seen(action), recorded)
    return WayBack((*way.actions, action), way.detected, max(way.recorded, recorded))


def left_open(resume: ResumeState) -> WayBack | None:
    """The way back that an earlier supervisor, or its loss, began with this attempt."""
    if not resume.actions:
        return None
    action = resume.actions[-1]
    if action.attempt != resume.attempt - 1 or not is_restart(action):
        return None
    return WayBack((action,), _seen(action), resume.step)


def _seen(action: Action) -> float:
    """When the trouble that it answers was, as ``monitoring.summary`` counts too."""
    return min([*(incident.time for incident in action.incidents), action.time])
