"""An action as a rung drafts it: what it answers and why, and where it goes back to. Pure.

Promises: its place and time are the history's; where there is no way back that may be taken, the
draft is a ``PassedOver`` with the reason.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from monitoring.records import Incident
from orchestrator.actions import Action, ActionKind, History, PassedOver
from orchestrator.recovery.evidence import cause, landing
from orchestrator.spec.config import RecoveryConfig


def drafted(
    kind: ActionKind, incidents: Sequence[Incident], history: History, reason: str
) -> Action:
    """An action of now, in answer to ``incidents``."""
    return Action(
        kind=kind,
        attempt=history.attempt,
        timeline=history.timeline,
        step=history.step,
        time=history.time,
        reason=reason,
        incidents=tuple(incidents),
    )


def going_back(
    kind: ActionKind,
    incidents: Sequence[Incident],
    history: History,
    policy: RecoveryConfig,
    remedy: str = "",
    row: Sequence[Action] = (),
) -> Action | PassedOver:
    """An action that goes back first; ``remedy`` says what else it does, ``row`` what skipped
    batches before it."""
    place = landing(incidents, history, policy, row)
    if isinstance(place, str):
        return PassedOver(kind, place)
    words = place.words[0].upper() + place.words[1:]
    reason = f"{words}{remedy}: {cause(incidents)}."
    return replace(
        drafted(kind, incidents, history, reason),
        to_step=place.to_step,
        in_place=place.in_place,
        skip_batches=place.skip_batches,
    )
