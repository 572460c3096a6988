"""Sudden rises of the gradient norm.

Sees: log(gradient norm) above its trend. Statistic: the residual from a Theil–Sen trend of
the newest healthy steps (followed down, never up), as a robust z-score among the residuals
of the last ``window`` healthy steps. Fires when it reaches ``grad_norm_sigmas`` and the norm
is at least ``grad_norm_min_ratio`` times the trend for ``grad_norm_patience`` steps, or
``HEAVY`` times that ratio in one. Silent until ``min_history`` healthy steps were seen.

Must not fire on: the drift of the norm while the learning rate warms up or decays, noise of
small batches, a single batch whose gradient is clipped to a sixth, a norm that falls. A zero
norm is left out: it says nothing of the next.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from monitoring.detectors.base import Detector, register
from monitoring.detectors.baseline import NO_BASELINE, Baseline
from monitoring.records import Incident, StepRecord

LEAST_SPREAD = 0.05
"""Least deviation of log(norm), five percent."""


HEAVY = 2.5
"""Times ``grad_norm_min_ratio`` from which one step is enough."""


@dataclass(frozen=True, slots=True)
class NormState:
    """The baseline of log(norm), and the present row of leaps."""

    baseline: Baseline = NO_BASELINE
    run: int = 0
    since: int = 0
    """First step of the row, if there is one."""


@register
class GradNormSpike(Detector[NormState]):
    """Fires when the gradient norm leaps."""

    name = "grad_norm_spike"

    def initial(self) -> NormState:
        return NormState()

    def dump(self, state: NormState) -> Any:
        return [state.baseline.dump(), state.run, state.since]

    def load(self, row: Any) -> NormState:
        baseline, run, since = row
        return NormState(Baseline.load(baseline), int(run), int(since))

    def observe(self, state: NormState, record: StepRecord) -> tuple[NormState, list[Incident]]:
        norm, config, baseline = record.grad_norm, self.config, state.baseline
        if record.skipped or not math.isfinite(norm) or norm <= 0.0:
            return state, []
        value = math.log(norm)
        trend = baseline.expected(record.step, value)
        following = baseline.add(record.step, value, trend, config.window)
        if not baseline.trusted(config.min_history):
            return NormState(following), []
        sigmas = baseline.sigmas(value - trend, LEAST_SPREAD)
        ratio = math.exp(value - trend)
        if sigmas < config.grad_norm_sigmas or ratio < config.grad_norm_min_ratio:
            return NormState(following), []
        since = state.since if state.run else record.step
        leaping = NormState(baseline, state.run + 1, since)
        if leaping.run < config.grad_norm_patience and ratio < HEAVY * config.grad_norm_min_ratio:
            return leaping, []
        return leaping, [self._incident(record, ratio, sigmas, since)]

    def _incident(self, record: StepRecord, ratio: float, sigmas: float, since: int) -> Incident:
        norm, usual = record.grad_norm, record.grad_norm / ratio
        return self.incident(
            record,
            onset_step=since,
            message=(
                f"Gradient norm {norm:.3g} in step {record.step}, {ratio:.1f} times its trend "
                f"of {usual:.3g} and {sigmas:.0f} robust deviations out "
                f"(limits {self.config.grad_norm_min_ratio:g}, {self.config.grad_norm_sigmas:g})."
            ),
            evidence={
                "grad_norm": norm,
                "trend": usual,
                "ratio": ratio,
                "sigmas": sigmas,
                "loss": record.loss,
            },
        )
