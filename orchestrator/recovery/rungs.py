"""The rungs of the recovery ladder, mildest first. Pure: no clock, no I/O.

A rung answers some incidents, has a budget in the spec, and either gives an Action or
says why it is passed over. Budgets are counted from the stored actions of the job, so
that a new supervisor counts what the one before it spent.

What decides is evidence:

- a non-finite step costs its own update only, since every rank left it out already;
  several in a row mean that the state is bad, not the batch;
- trouble without a trace in FP8 is answered by going back and skipping the batches that
  the touched steps used;
- a layer that saturated in FP8 goes to BF16 at once: other batches would not cure it;
- gradients that the exchange rounds too coarsely, and nothing else, cross the network in
  BF16: no state is bad, so nothing is rolled back;
- a layer that FP8 will soon fit no more, or fits badly, goes to BF16 where training is: no
  state is bad yet;
- a loss that leaps to the same height, or stays there, from the same step on with every batch, in
  BF16 too, is other data: training goes on;
- replicas that differ are restarted from before they did, once within the horizon: a machine
  that corrupts what it holds is for a person;
- what comes back within the horizon was not cured, and climbs; a leap of loss or gradients only
  after a few rollbacks close to each other, for another bad batch may have followed. Loss,
  gradient norm and non-finite values are symptoms of one trouble (divergence); saturation is
  another.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Protocol

from monitoring.records import Incident
from orchestrator.actions import Action, ActionKind, History, PassedOver
from orchestrator.recovery.drafts import drafted, going_back
from orchestrator.recovery.evidence import (
    CORRUPTION,
    EARLY,
    EXCHANGE,
    LOST_RANK,
    SKIPPING,
    answers_in_a_row,
    cause,
    earlier_answer,
    fp8_now,
    fp8_suspects,
    is_leap,
    onset,
    other_data,
    raised_again,
    repaired_within,
    skips_in_a_row,
    snapshot_before,
    spans,
    touched_batches,
)
from orchestrator.recovery.restart_budget import rest_s, restarts_spent
from orchestrator.recovery.rung_budgets import fallbacks_spent, spent
from orchestrator.spec.config import RecoveryConfig


class Rung(Protocol):
    """One remedy."""

    kind: ActionKind

    def consider(
        self, incidents: Sequence[Incident], history: History, policy: RecoveryConfig
    ) -> Action | PassedOver:
        """The action, or why it is not this rung's turn. ``incidents`` is not empty."""


def no_instability(kind: ActionKind, incidents: Sequence[Incident]) -> PassedOver | None:
    """Remedies of training are no answer to a lost rank, to a coarse exchange, to replicas that
    differ, nor to what is told before anything is wrong.

    Nor to a non-finite step beside a lost rank: its update was left out, and if it comes
    back the next attempt sees it.
    """
    if any(incident.kind in CORRUPTION for incident in incidents):
        return PassedOver(kind, "no remedy of training makes replicas the same")
    if all(incident.kind in EXCHANGE for incident in incidents):
        return PassedOver(kind, "rounding in the exchange is no instability of training")
    if all(incident.kind in EXCHANGE | EARLY for incident in incidents):
        return PassedOver(kind, "the state that training is in is still good")
    lost = any(incident.kind in LOST_RANK for incident in incidents)
    harmless = LOST_RANK | EXCHANGE | EARLY | {"nonfinite"}
    if lost and all(incident.kind in harmless for incident in incidents):
        return PassedOver(kind, "a lost rank is no instability of training")
    return None


# The rungs.


class SkipStep:
    """Answers non-finite steps. The ranks left the update out; nothing else is to be done."""

    kind: ActionKind = "skip_step"

    def consider(
        self, incidents: Sequence[Incident], history: History, policy: RecoveryConfig
    ) -> Action | PassedOver:
        others = sorted({i.kind for i in incidents if i.kind != "nonfinite"})
        if others:
            return PassedOver(self.kind, f"answers non-finite steps only, not {', '.join(others)}")
        if any(incident.evidence.get("update_skipped") == 0.0 for incident in incidents):
            return PassedOver(self.kind, "the update was made: the state is bad")
        row = len(skips_in_a_row(min(i.step for i in incidents), history)) + 1
        if row > policy.max_consecutive_skips:
            return PassedOver(
                self.kind,
                f"{row} non-finite steps in a row, more than recovery.max_consecutive_skips = "
                f"{policy.max_consecutive_skips}: the state is bad, not the batch",
            )
        if refused := spent(self.kind, history, policy, "max_skips"):
            return refused
        reason = f"The update was left out, which is enough: {cause(incidents)}."
        return drafted(self.kind, incidents, history, reason)


class ExchangeBF16:
    """Answers an exchange in FP8 whose rounding error is too large: gradients go in BF16.

    Beside another trouble it waits: whatever is done about that may cure this, and the
    detector speaks again if it doesn't.
    """

    kind: ActionKind = "exchange_bf16"

    def consider(
        self, incidents: Sequence[Incident], history: History, policy: RecoveryConfig
    ) -> Action | PassedOver:
        if not any(incident.kind in EXCHANGE for incident in incidents):
            return PassedOver(self.kind, "the exchange's rounding is within its limit")
        if others := sorted({i.kind for i in incidents if i.kind not in EXCHANGE}):
            return PassedOver(self.kind, f"{', '.join(others)} comes first")
        if history.exchange != "fp8":
            return PassedOver(self.kind, "gradients don't cross the network in FP8 any more")
        if refused := spent(self.kind, history, policy, "max_exchange_fallbacks", for_life=True):
            return refused
        reason = f"Gradients cross the network in BF16 from here on: {cause(incidents)}."
        return replace(drafted(self.kind, incidents, history, reason), exchange="bf16")


class EarlyFallback:
    """Answers layers that FP8 fits badly, or soon will: they go to BF16 where training is.

    Beside another trouble it waits, which takes these suspects along. The budget is that of the
    rung which moves layers after the fact.
    """

    kind: ActionKind = "early_fallback"

    def consider(
        self, incidents: Sequence[Incident], history: History, policy: RecoveryConfig
    ) -> Action | PassedOver:
        if not any(incident.kind in EARLY for incident in incidents):
            return PassedOver(self.kind, "no layer is about to leave FP8's range")
        if others := sorted({i.kind for i in incidents if i.kind not in EARLY | EXCHANGE}):
            return PassedOver(self.kind, f"{', '.join(others)} comes first")
        suspects = fp8_suspects(incidents, history, policy)
        if not suspects:
            return PassedOver(self.kind, "the evidence names no layer that computes in FP8")
        if refused := fallbacks_spent(self.kind, history, policy):
            return refused
        verb = "computes" if len(suspects) == 1 else "compute"
        reason = f"{', '.join(suspects)} {verb} in BF16 from here on: {cause(incidents)}."
        action = drafted(self.kind, incidents, history, reason)
        return replace(action, precision=dict.fromkeys(suspects, "bf16"))


class Rollback:
    """Answers instability that no FP8 layer explains: other batches, the same precision.

    Bad batches come in stretches, so that it may come back a few times, each with other batches.
    """

    kind: ActionKind = "rollback"

    def consider(
        self, incidents: Sequence[Incident], history: History, policy: RecoveryConfig
    ) -> Action | PassedOver:
        if refused := no_instability(self.kind, incidents):
            return refused
        # A non-finite value spreads through every layer it meets: it names no cause.
        telling = [incident for incident in incidents if incident.kind != "nonfinite"]
        if suspects := fp8_suspects(telling, history, policy):
            return PassedOver(
                self.kind, f"{', '.join(suspects)} moved first in FP8: other batches do not cure it"
            )
        row = answers_in_a_row(incidents, history, policy, SKIPPING)
        if earlier := earlier_answer(incidents, history, policy):
            back = f"came back within the horizon of {policy.horizon} steps of the"
            if not row or not all(map(is_leap, (incidents, *(a.incidents for a in row)))):
                return PassedOver(self.kind, f"{back} {earlier.kind} at step {earlier.step}")
            if len(row) >= policy.max_consecutive_rollbacks:
                return PassedOver(
                    self.kind,
                    f"{back} {earlier.kind} at step {earlier.step}, {len(row)} in a row "
                    f"(recovery.max_consecutive_rollbacks = {policy.max_consecutive_rollbacks}): "
                    "the state is bad, not the batches",
                )
        if refused := spent(self.kind, history, policy, "max_rollbacks"):
            return refused
        return going_back(self.kind, incidents, history, policy, row=row)


class LayerFallback:
    """Answers trouble whose evidence names FP8 layers: those layers alone go to BF16.

    Recurrence does not close this rung: fresh suspects are fresh evidence, and the
    budget bounds it.
    """

    kind: ActionKind = "layer_fallback"

    def consider(
        self, incidents: Sequence[Incident], history: History, policy: RecoveryConfig
    ) -> Action | PassedOver:
        if refused := no_instability(self.kind, incidents):
            return refused
        suspects = fp8_suspects(incidents, history, policy)
        if not suspects:
            return PassedOver(self.kind, "the evidence names no layer that computes in FP8")
        if refused := fallbacks_spent(self.kind, history, policy):
            return refused
        remedy = f", with {', '.join(suspects)} in BF16"
        action = going_back(self.kind, incidents, history, policy, remedy)
        if isinstance(action, PassedOver):
            return action
        return replace(action, precision=dict.fromkeys(suspects, "bf16"))


class WholeBF16:
    """Answers what the rungs before could not cure: every layer to BF16."""

    kind: ActionKind = "whole_bf16"

    def consider(
        self, incidents: Sequence[Incident], history: History, policy: RecoveryConfig
    ) -> Action | PassedOver:
        if refused := no_instability(self.kind, incidents):
            return refused
        layers = fp8_now(history)
        if not layers:
            return PassedOver(self.kind, "no layer computes in FP8")
        if refused := spent(self.kind, history, policy, "max_whole_fallbacks"):
            return refused
        remedy = f", with all {len(layers)} FP8 layers in BF16"
        action = going_back(self.kind, incidents, history, policy, remedy)
        if isinstance(action, PassedOver):
            return action
        return replace(action, precision=dict.fromkeys(layers, "bf16"))


class Accept:
    """Answers a loss that leaps to the same height whatever is tried: the data is another.

    It did so at the same step with other batches, and in BF16. Nothing is undone: training goes
    on, and the detectors learn the new level.
    """

    kind: ActionKind = "accept"

    def consider(
        self, incidents: Sequence[Incident], history: History, policy: RecoveryConfig
    ) -> Action | PassedOver:
        if refused := no_instability(self.kind, incidents):
            return refused
        found = other_data(incidents, history, policy)
        if isinstance(found, str):
            return PassedOver(self.kind, found)
        if refused := spent(self.kind, history, policy, "max_accepted_leaps"):
            return refused
        reason = (
            f"Training goes on and the detectors begin anew: at step {onset(incidents, history)} "
            f"the loss goes up to {found.height:.3g} at most, with {found.tries} different "
            "stretches of batches, in BF16 too, so that the data is another and the state is not "
            f"bad: "
            f"{cause(incidents)}."
        )
        return drafted(self.kind, incidents, history, reason)


def _too_much_other_data(
    incidents: Sequence[Incident], history: History, policy: RecoveryConfig
) -> bool:
    """Whether the data has become another, once more than may be accepted."""
    other = other_data(incidents, history, policy)
    return policy.max_accepted_leaps > 0 and not isinstance(other, str)


class LowerLR:
    """Answers instability that BF16 does not cure. Other data is none."""

    kind: ActionKind = "lower_lr"

    def consider(
        self, incidents: Sequence[Incident], history: History, policy: RecoveryConfig
    ) -> Action | PassedOver:
        if refused := no_instability(self.kind, incidents):
            return refused
        if _too_much_other_data(incidents, history, policy):
            return PassedOver(self.kind, "the data is another, which no learning rate cures")
        if refused := spent(self.kind, history, policy, "max_lr_cuts", for_life=True):
            return refused
        scale = history.lr_scale * policy.lr_factor
        remedy = f", with the learning rate at {scale:.3g} of its schedule"
        action = going_back(self.kind, incidents, history, policy, remedy)
        return action if isinstance(action, PassedOver) else replace(action, lr_scale=scale)


class Restart:
    """Answers lost ranks: the next attempt, from the newest state that all ranks have.

    And replicas that differ: from the newest state of a step at which they were compared and
    did not, with the batches that followed.
    """

    kind: ActionKind = "restart"

    def consider(
        self, incidents: Sequence[Incident], history: History, policy: RecoveryConfig
    ) -> Action | PassedOver:
        broken = [incident for incident in incidents if incident.kind in CORRUPTION]
        if not broken and not any(incident.kind in LOST_RANK for incident in incidents):
            return PassedOver(self.kind, "no rank was lost")
        if raised_again(incidents, history):
            return PassedOver(self.kind, "the ranks raised an error twice without a step between")
        if why := restarts_spent(history, policy, incidents):
            return PassedOver(self.kind, why)
        if broken:
            if earlier := repaired_within(history, policy):
                return PassedOver(
                    self.kind,
                    f"replicas differ again within the horizon of {policy.horizon} steps of the "
                    f"restart at step {earlier.step}",
                )
            good = max(0, min(incident.onset_step for incident in broken))
            reason = f"Restart from before replicas differed, step {good} at most"
            action = drafted(self.kind, incidents, history, f"{reason}: {cause(incidents)}.")
            return replace(action, in_place=False, to_step=good)
        action = replace(drafted(self.kind, incidents, history, ""), in_place=False)
        rest = rest_s((*history.actions, action))
        resting = f" after {rest:.0f} s, in which what is away may come back" if rest else ""
        reason = f"Restart from the newest state that all ranks have{resting}: {cause(incidents)}."
        return replace(action, reason=reason)


class Watch:
    """Answers what is not bad yet and can't be helped: an exchange that is coarse and may not
    fall back, layers that may not leave FP8. Training goes on with it."""

    kind: ActionKind = "none"

    def consider(
        self, incidents: Sequence[Incident], history: History, policy: RecoveryConfig
    ) -> Action | PassedOver:
        if others := sorted({i.kind for i in incidents if i.kind not in EXCHANGE | EARLY}):
            return PassedOver(self.kind, f"{', '.join(others)} can't be left alone")
        reason = f"Training goes on as it is: {cause(incidents)}."
        return drafted(self.kind, incidents, history, reason)


class Exhausted:
    """Answers everything, last: stop and call a person.

    Where a snapshot from before the trouble is left, a pause goes back to it first, so
    that the checkpoint it leaves behind is of a good state; else ``to_step`` says how far back
    a resumed job starts. It leaves out the batches that the touched steps used, and its ladder
    begins anew (``recovery.fresh_start``). An error that the ranks raise in every attempt is
    for whoever wrote the job, so it fails.
    """

    kind: ActionKind = "pause"

    def consider(
        self, incidents: Sequence[Incident], history: History, policy: RecoveryConfig
    ) -> Action | PassedOver:
        lost = any(incident.kind in LOST_RANK for incident in incidents)
        unstable = no_instability(self.kind, incidents) is None
        first = onset(incidents, history)
        found = None if lost else snapshot_before(first, history.restorable)
        skip = touched_batches(first, history) if unstable else ()
        failing = policy.on_exhausted == "fail" or raised_again(incidents, history)
        told = "Failed" if failing else "Paused for a person"
        why = restarts_spent(history, policy, incidents) if lost else ""
        if unstable and not failing and _too_much_other_data(incidents, history, policy):
            why = "the data changes more often than recovery.max_accepted_leaps lets it"
        skipping = f"; resumed, it skips {spans(skip, 'batch', 'batches')}" if skip else ""
        reason = f"{told}, {why or 'no rung of the ladder is left'}{skipping}: {cause(incidents)}."
        action = drafted("fail" if failing else "pause", incidents, history, reason)
        action = replace(action, skip_batches=skip)
        if failing or found is None:
            return replace(action, in_place=False, to_step=first if unstable else None)
        return replace(action, to_step=found.step)
