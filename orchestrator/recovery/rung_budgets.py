"""Which budgets of rungs are used up. Those of restarts are in ``restart_budget``. Pure.

Promises: counted from stored actions, in the window of budgets or for the job's life; where one is
used up, the rung is told how many of how many, under the key that sets it.
"""

from __future__ import annotations

from orchestrator.actions import ActionKind, History, PassedOver
from orchestrator.recovery.evidence import count
from orchestrator.spec.config import RecoveryConfig


def spent(
    kind: ActionKind, history: History, policy: RecoveryConfig, key: str, *, for_life: bool = False
) -> PassedOver | None:
    """Whether the budget ``recovery.<key>`` is used up, in the window of budgets or for life."""
    within = None if for_life else policy.budget_window_steps
    used, budget = count(history, kind, within), getattr(policy, key)
    if used < budget:
        return None
    return PassedOver(
        kind, f"{used} of recovery.{key} = {budget} are used{_since(history, within)}"
    )


def fallbacks_spent(
    kind: ActionKind, history: History, policy: RecoveryConfig
) -> PassedOver | None:
    """Whether layers were moved to BF16 as often as they may be, early or late."""
    within = policy.budget_window_steps
    used = count(history, "layer_fallback", within) + count(history, "early_fallback", within)
    if used < policy.max_layer_fallbacks:
        return None
    budget = f"recovery.max_layer_fallbacks = {policy.max_layer_fallbacks}"
    return PassedOver(kind, f"{used} of {budget} are used{_since(history, within)}")


def _since(history: History, within: int | None) -> str:
    return f" since step {history.step - within}" if within and history.step >= within else ""
