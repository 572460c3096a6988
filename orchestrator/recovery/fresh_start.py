"""Where the recovery ladder begins anew: after each time it gave up and a person let the job go on.

A job that the ladder paused, or failed, goes on only because somebody looked at it and resumed
it, so that the action that gave up is itself the mark. Pure. Promises: what counts is told by the
stored actions alone, for a new supervisor and for a replay; a pause that a person asked for, or
room for another job, renews nothing.
"""

from __future__ import annotations

from collections.abc import Sequence

from orchestrator.actions import Action


def gave_up(action: Action) -> bool:
    """Whether the ladder ended the job with it: only a person has it go on."""
    return action.kind in ("pause", "fail") and action.asked is None


def since_fresh_start(actions: Sequence[Action]) -> Sequence[Action]:
    """Those of ``actions`` (oldest first) that budgets and recurrence count."""
    for i in range(len(actions) - 1, -1, -1):
        if gave_up(actions[i]):
            return actions[i + 1 :]
    return actions
