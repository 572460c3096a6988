"""How many restarts recovery may cost, and when they no longer get a job anywhere. Pure.

Promises: both are counted from stored actions; what a person asked for charges nothing, and after
a pause or a failure that a person resumed, both are counted anew (``recovery.fresh_start``); an
attempt whose nodes failed preflight had no ranks to lose, and is in vain all the same.
"""

from __future__ import annotations

from collections.abc import Sequence

from monitoring.records import Incident
from orchestrator.actions import Action, History
from orchestrator.recovery.fresh_start import since_fresh_start
from orchestrator.spec.config import RecoveryConfig

OUTSIDE = "outside"
"""In the evidence of an incident: what the ranks raised lies in what surrounds the job, and may
pass, as a storage that is away."""
UNMET = "unmet"
"""In the evidence of an incident: ranks didn't come to where the attempt's ranks meet."""
_FIRST_REST_S = 30.0
_LONGEST_REST_S = 600.0


def is_restart(action: Action) -> bool:
    """Whether the action ends its attempt for another one."""
    return action.kind == "restart" or (
        not action.in_place and action.kind not in ("pause", "fail")
    )


def before_ranks(incidents: Sequence[Incident]) -> bool:
    """Whether an attempt ended for its nodes, before it had ranks."""
    return bool(incidents) and all(i.kind == "preflight_failed" for i in incidents)


def is_outside(incidents: Sequence[Incident]) -> bool:
    """Whether what ended an attempt lies in what surrounds the job."""
    return any(incident.evidence.get(OUTSIDE) for incident in incidents)


def rest_s(actions: Sequence[Action]) -> float:
    """Seconds that the attempt after ``actions``, oldest first, waits before its ranks start: what
    is away needs time to come back, more each time in a row."""
    row = 0
    for action in reversed(actions):
        same = action.step == actions[-1].step
        if not (is_restart(action) and is_outside(action.incidents) and same):
            break
        row += 1
    return min(_LONGEST_REST_S, _FIRST_REST_S * 4 ** (row - 1)) if row else 0.0


def rest_before_s(actions: Sequence[Action], attempt: int, step: int) -> float:
    """Seconds that ``attempt``, of a job that recorded ``step`` last, waits before its ranks start:
    none where another one ran since the newest of ``actions``, or a step was done. Where it was the
    supervisor that ended, the controller has rested before it started this one."""
    newest = actions[-1] if actions else None
    if newest is None or newest.attempt != attempt - 1 or newest.step < step:
        return 0.0
    if any(incident.kind == "supervisor_lost" for incident in newest.incidents):
        return 0.0
    return rest_s(actions)


def restarts_within(history: History, window_steps: int) -> int:
    """Attempts that recovery has cost in the newest ``window_steps`` steps.

    Steps, not seconds: they stand still while a job dies again and again.
    """
    return sum(
        is_restart(action)
        and action.asked is None
        and not before_ranks(action.incidents)
        and history.step - action.step < window_steps
        for action in since_fresh_start(history.actions)
    )


def without_progress(history: History) -> int:
    """Attempts in a row, the present one included, that ended without a step beyond those
    before; on a way back, without one beyond where it led."""
    reached = -1
    row = 0
    for action in history.actions:
        if action.kind in ("pause", "fail"):
            row = 0
        elif is_restart(action):
            row = 0 if action.asked is not None or action.step > reached else row + 1
            reached = max(reached, action.step)
        if action.to_step is not None:
            reached = min(reached, action.to_step - 1)
    return 0 if history.step > reached else row + 1


def restarts_spent(
    history: History, policy: RecoveryConfig, incidents: Sequence[Incident] = ()
) -> str:
    """Why no restart is left in answer to ``incidents``; empty while one is."""
    used = restarts_within(history, policy.restart_window_steps)
    if used >= policy.max_restarts and not before_ranks(incidents):
        since = history.step - policy.restart_window_steps
        within = f" since step {since}" if since >= 0 else ""
        return f"{used} of recovery.max_restarts = {policy.max_restarts} are used{within}"
    vain = without_progress(history)
    if vain >= policy.max_attempts_without_progress:
        return (
            f"{vain} attempts in a row ended without a new step "
            f"(recovery.max_attempts_without_progress = {policy.max_attempts_without_progress})"
        )
    return ""
