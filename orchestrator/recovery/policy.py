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
from orchestrator.recovery.drafts import drafted
from orchestrator.recovery.evidence import LOST_RANK, count, kept_by_hand
from orchestrator.recovery.rungs import (
    Accept,
    EarlyFallback,
    ExchangeBF16,
    Exhausted,
    LayerFallback,
    LowerLR,
    Restart,
    Rollback,
    Rung,
    SkipStep,
    Watch,
    WholeBF16,
)
from orchestrator.spec.config import RecoveryConfig
from parallel.config import ExchangeDtype

__all__ = [
    "LADDER",
    "Action",
    "ActionKind",
    "History",
    "PassedOver",
    "Restorable",
    "decide",
    "exchange_chosen",
    "exchange_to_fp8",
    "return_to_fp8",
]

# The mildest remedy first; Exhausted answers everything, so it is the last.
LADDER: tuple[Rung, ...] = (
    SkipStep(),
    ExchangeBF16(),
    EarlyFallback(),
    Rollback(),
    LayerFallback(),
    WholeBF16(),
    Accept(),
    LowerLR(),
    Restart(),
    Watch(),
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
    was moved to BF16 again after its return stays there, and so does one that a person put
    there.
    """
    by_hand = kept_by_hand(history)
    fallen = [
        name
        for name, precision in history.precision.items()
        if precision == "bf16" and name not in by_hand
    ]
    if not fallen and by_hand & set(history.precision):
        reason = f"{', '.join(sorted(by_hand & set(history.precision)))} in BF16 by hand."
        return drafted("none", (), history, reason)
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


def exchange_chosen(history: History, dtype: ExchangeDtype, why: str) -> Action:
    """The job's decision under ``communication_data_type: auto``: what was measured, for good."""
    reason = f"Gradients cross the network in {dtype.upper()}: {why.rstrip('.')}."
    action = drafted("exchange_chosen", (), history, reason)
    return replace(action, exchange=dtype, step=max(history.step, 0))


def exchange_to_fp8(history: History, policy: RecoveryConfig) -> Action:
    """The exchange back to FP8 after ``calm_steps`` healthy steps, or ``none`` with the reason.

    Counted from the newest of the last incident and the last fallback. Once the budget of
    fallbacks is spent it stays in BF16: nothing could be done about it again.
    """
    kinds = ("exchange_bf16", "exchange_fp8", "exchange_auto", "exchange_chosen")
    moves = [a for a in history.actions if a.kind in kinds]
    if not moves or moves[-1].kind != "exchange_bf16":
        return drafted("none", (), history, "The gradient exchange has not fallen back.")
    if (asked := moves[-1].asked) is not None:
        reason = f"The gradient exchange was put into BF16 by {asked.by}, and stays there."
        return drafted("none", (), history, reason)
    fallbacks = count(history, "exchange_bf16")
    if fallbacks >= policy.max_exchange_fallbacks:
        reason = (
            f"The gradient exchange stays in BF16: {fallbacks} of "
            f"recovery.max_exchange_fallbacks = {policy.max_exchange_fallbacks} are used."
        )
        return drafted("none", (), history, reason)
    seen = -1 if history.last_incident_step is None else history.last_incident_step
    since = max(moves[-1].step, seen)
    calm = history.step - since
    if calm < policy.calm_steps:
        reason = f"{calm} healthy steps since step {since}; {policy.calm_steps} are asked for."
        return drafted("none", (), history, reason)
    reason = f"Gradients cross the network in FP8 again after {calm} healthy steps."
    return replace(drafted("exchange_fp8", (), history, reason), exchange="fp8")


def fallen_again(history: History) -> set[str]:
    """Layers that went to BF16, came back, and went again.

    What a person moves has not failed, and what a person brings back begins anew. Nor have layers
    failed that went for a leap that turned out to be other data, which BF16 led to as well.
    """
    returned: set[str] = set()
    again: set[str] = set()
    newest: set[str] = set()
    for action in history.actions:
        if action.kind == "accept":
            again -= newest
        fell = {name for name, precision in action.precision.items() if precision == "bf16"}
        if action.asked is not None:
            returned -= set(action.precision)
            again -= set(action.precision)
            continue
        returned |= set(action.precision) - fell
        # What had failed before it has failed whatever this one turns out to be.
        newest = (fell & returned) - again if action.kind == "whole_bf16" else set()
        again |= fell & returned
    return again
