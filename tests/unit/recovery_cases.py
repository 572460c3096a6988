"""Incidents and histories as the recovery policy is given them, and its answers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from monitoring.records import Incident, Suspect
from orchestrator.recovery.policy import Action, History, Restorable, decide
from orchestrator.spec.config import RecoveryConfig

POLICY = RecoveryConfig()
LAYERS = ("layers.0.mlp.down", "layers.1.mlp.down", "layers.2.mlp.down")
DOWN = LAYERS[1]


def incident(kind: str, step: int, onset: int | None = None, *suspects: str) -> Incident:
    return Incident(
        kind=kind,  # type: ignore[arg-type]
        detector=kind,
        attempt=1,
        timeline=0,
        step=step,
        onset_step=step if onset is None else onset,
        time=float(step),
        message=f"{kind} at step {step}",
        suspects=tuple(Suspect(name, "input", {"saturated_pct": 7.0}) for name in suspects),
    )


def history(step: int = 61, **changes: Any) -> History:
    base = History(
        attempt=1,
        timeline=0,
        step=step,
        time=1000.0,
        actions=(),
        restorable=(Restorable(40, 0, True), Restorable(50, 0, True), Restorable(60, 0, False)),
        precision={},
        fp8_layers=LAYERS,
        lr_scale=1.0,
        ledger=(),
        batches={s: s for s in range(step + 1)},
        last_incident_step=None,
        exchange="fp8",
    )
    return replace(base, **changes)


def why(action: Action, rung: str) -> str:
    """Why that rung was passed over."""
    return next(p.why for p in action.passed_over if p.rung == rung)


def act(hist: History, *incidents: Incident, policy: RecoveryConfig = POLICY) -> Action:
    """The policy's answer to incidents that arrived together."""
    return decide(incidents, hist, policy)
