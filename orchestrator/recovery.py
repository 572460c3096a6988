"""The recovery policy: (incidents, history, policy) → Action. Pure: no clock, no I/O.

Promises: the same stored history and the same incidents always give the same Action;
budgets of the spec are never exceeded; an Action says what it answers, what it does,
and why each rung before it was passed over. A new remedy is a class in ``rungs.py``
and a line in ``LADDER``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from monitoring.records import Incident
from orchestrator.actions import Action, ActionKind, History, PassedOver, Restorable
from orchestrator.config import RecoveryConfig
from orchestrator.evidence import LOST_RANK
from orchestrator.rungs import (
    Exhausted,
    LayerFallback,
    LowerLR,
    Restart,
    Rollback,
    Rung,
    SkipStep,
    WholeBF16,
    drafted,
)

__all__ = [
    "LADDER",
    "Action",
    "ActionKind",
    "History",
    "PassedOver",
    "Restorable",
    "decide",
    "return_to_fp8",
]

# The mildest remedy first; Exhausted answers everything, so it is the last.
LADDER: tuple[Rung, ...] = (
    SkipStep(),
    Rollback(),
    LayerFallback(),
    WholeBF16(),
    LowerLR(),
    Restart(),
    Exhausted(),
)


def decide(
    incidents: Sequence[Incident],
    history: History,
    policy: RecoveryConfig,
    ladder: Sequence[Rung] = LADDER,
) -> Action:
    """One action for incidents that arrived together; kind ``none`` for no incident.

    A rank lost together with an instability: the remedy of the instability is taken
    into the restart, because the snapshots in the ranks' own memory are gone with it.
    """
    if not incidents:
        return drafted("none", (), history, "No incident.")
    if any(incident.kind in LOST_RANK for incident in incidents):
        history = replace(history, restorable=())
    passed: list[PassedOver] = []
    for rung in ladder:
        answer = rung.consider(incidents, history, policy)
        if isinstance(answer, Action):
            return replace(answer, passed_over=tuple(passed))
        passed.append(answer)
    raise AssertionError("the last rung of a ladder answers everything")


def return_to_fp8(history: History, policy: RecoveryConfig) -> Action:
    """Layers back to FP8 after ``calm_steps`` healthy steps, or ``none`` with the reason.

    Counted from the newest of the last incident and the last move to BF16. A layer that
    was moved to BF16 again after its return stays there.
    """
    fallen = [name for name, precision in history.precision.items() if precision == "bf16"]
    if not fallen:
        return drafted("none", (), history, "All layers have the spec's precision.")
    staying = fallen_again(history)
    ready = sorted(name for name in fallen if name not in staying)
    if not ready:
        return drafted("none", (), history, f"{', '.join(sorted(fallen))} failed after a return.")
    moves = [a.step for a in history.actions if "bf16" in a.precision.values()]
    since = max([*moves, -1 if history.last_incident_step is None else history.last_incident_step])
    calm = history.step - since
    if calm < policy.calm_steps:
        reason = f"{calm} healthy steps since step {since}; {policy.calm_steps} are asked for."
        return drafted("none", (), history, reason)
    kept = f" ({', '.join(sorted(staying & set(fallen)))} stay)" if staying & set(fallen) else ""
    reason = f"{', '.join(ready)} back to FP8 after {calm} healthy steps{kept}."
    action = drafted("return_to_fp8", (), history, reason)
    return replace(action, precision=dict.fromkeys(ready, "fp8"))


def fallen_again(history: History) -> set[str]:
    """Layers that went to BF16, came back, and went again."""
    returned: set[str] = set()
    again: set[str] = set()
    for action in history.actions:
        for name, precision in action.precision.items():
            if precision == "fp8":
                returned.add(name)
            elif name in returned:
                again.add(name)
    return again
