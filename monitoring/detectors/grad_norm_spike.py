"""Sudden rises of the gradient norm.

Sees: log(gradient norm) above its trend, and the loss beside it. Statistic: the residual from a
Theil–Sen trend of the newest healthy steps (followed down, never up), as a robust z-score among
the residuals of the last ``window`` healthy steps. It leaps when that reaches
``grad_norm_sigmas`` and the norm is at least ``grad_norm_min_ratio`` times the trend. Fires when
it leaps for ``grad_norm_patience`` steps, when it is ``ENORMOUS`` times that ratio in one, or
``HEAVY`` times it in one whose loss leaps by a spike's limits too, and when the loss does so in the
step after a leap. Silent until
``min_history`` healthy steps were seen.

A norm that is as far below the trend enters its baseline when that has lasted.

Must not fire on: the drift of the norm while the learning rate warms up or decays, noise of
small batches, a single batch whose gradient is clipped to a twelfth and whose update leaves no
trace in the next loss, a norm that falls, a stretch of easy batches and its end. A zero norm is
left out: it says nothing of the next.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

from monitoring.detectors.base import Detector, register
from monitoring.detectors.baseline import (
    LASTING,
    NO_BASELINE,
    NO_VALUES,
    Baseline,
    Window,
    median,
    robust_z,
)
from monitoring.detectors.loss_scale import scaled, unscaled
from monitoring.records import Incident, StepRecord

LEAST_SPREAD = 0.05
"""Least deviation of log(norm), five percent."""
ENORMOUS = 5.5
"""Times ``grad_norm_min_ratio`` from which one step is enough: 22 times the trend by default.
Single norms of 12 times it were seen once in 300 steps, and clipping heals them."""
HEAVY = 2.5
"""The same of a step whose loss leaps too."""
MOST_APART = 700.0
"""Log of the largest ratio that is told; the exponential of more is no number."""
LOSSES = 16
"""Losses of ordinary steps that are remembered."""
LEAST_LOSS_SPREAD = 0.01
"""Least deviation of log(loss), one percent."""


@dataclass(frozen=True, slots=True)
class Leap:
    """The largest norm of a row of leaps."""

    norm: float
    ratio: float
    """Over its trend."""
    sigmas: float
    step: int


@dataclass(frozen=True, slots=True)
class NormState:
    """The baseline of log(norm), the losses beside it, and the present row of leaps."""

    baseline: Baseline = NO_BASELINE
    losses: Window = NO_VALUES
    """Of ordinary steps, on the scale for losses of either sign."""
    run: int = 0
    since: int = 0
    """First step of the row, if there is one."""
    largest: Leap | None = None


@register
class GradNormSpike(Detector[NormState]):
    """Fires when the gradient norm leaps."""

    name = "grad_norm_spike"

    def initial(self) -> NormState:
        return NormState()

    def dump(self, state: NormState) -> Any:
        leap = state.largest
        return {
            "baseline": state.baseline.dump(),
            "losses": state.losses.dump(),
            "run": state.run,
            "since": state.since,
            "largest": None if leap is None else [leap.norm, leap.ratio, leap.sigmas, leap.step],
        }

    def load(self, row: Any) -> NormState:
        leap = row["largest"]
        return NormState(
            Baseline.load(row["baseline"]),
            Window.load(row["losses"]),
            int(row["run"]),
            int(row["since"]),
            None if leap is None else Leap(*leap),
        )

    def observe(self, state: NormState, record: StepRecord) -> tuple[NormState, list[Incident]]:
        norm, config, baseline = record.grad_norm, self.config, state.baseline
        if record.skipped or not math.isfinite(norm) or norm <= 0.0:
            return state, []
        value = math.log(norm)
        trend = baseline.expected(record.step, value)
        losses = state.losses
        loss_leaps = self._loss_leaps(losses, record.loss)
        if math.isfinite(record.loss) and not loss_leaps:
            losses = losses.add(record.step, scaled(record.loss, True), LOSSES)
        following = baseline.add(record.step, value, trend, config.window)
        if not baseline.trusted(config.min_history):
            return NormState(following, losses), []
        sigmas = baseline.sigmas(value - trend, LEAST_SPREAD)
        apart, least = value - trend, math.log(config.grad_norm_min_ratio)
        if sigmas < config.grad_norm_sigmas or apart < least:
            if -sigmas >= config.grad_norm_sigmas and -apart >= least:
                following = baseline.add_lower(record.step, value, max(LASTING, config.min_history))
            before = state.largest
            if before is None or not loss_leaps:
                return NormState(following, losses), []
            # The update that the leap led to did harm: the state from before it is the good one.
            return NormState(following, losses), [self._incident(record, before, state.since)]
        since = state.since if state.run else record.step
        largest = Leap(norm, math.exp(min(apart, MOST_APART)), sigmas, record.step)
        if state.largest is not None and state.largest.ratio > largest.ratio:
            largest = state.largest
        kept = replace(baseline, lower=NO_VALUES)
        leaping = NormState(kept, losses, state.run + 1, since, largest)
        at_once = apart >= least + math.log(HEAVY if loss_leaps else ENORMOUS)
        if leaping.run >= config.grad_norm_patience or at_once:
            return leaping, [self._incident(record, largest, since)]
        return leaping, []

    def _loss_leaps(self, losses: Window, loss: float) -> bool:
        """Whether the loss alone is a spike's limits above those before."""
        config = self.config
        if len(losses) < LOSSES or not math.isfinite(loss):
            return False
        value, usual = scaled(loss, True), median(losses.values)
        return (
            value - usual >= math.log1p(config.loss_min_rise)
            and loss - unscaled(usual, True) >= config.loss_min_rise_nats
            and robust_z(value, losses.values, LEAST_LOSS_SPREAD) >= config.loss_sigmas
        )

    def _incident(self, record: StepRecord, leap: Leap, since: int) -> Incident:
        usual = leap.norm / leap.ratio
        after = f"; the loss leapt in step {record.step}" if leap.step < record.step else ""
        return self.incident(
            record,
            onset_step=since,
            message=(
                f"Gradient norm {leap.norm:.3g} in step {leap.step}, {leap.ratio:.1f} times its "
                f"trend of {usual:.3g} and {leap.sigmas:.0f} robust deviations out "
                f"(limits {self.config.grad_norm_min_ratio:g}, {self.config.grad_norm_sigmas:g})"
                f"{after}."
            ),
            evidence={
                "grad_norm": leap.norm,
                "trend": usual,
                "ratio": leap.ratio,
                "sigmas": leap.sigmas,
                "loss": record.loss,
            },
        )
