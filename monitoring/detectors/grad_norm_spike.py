"""Sudden rises of the gradient norm.

Sees: log(gradient norm) above its trend. Statistic: the residual from a Theil–Sen trend of
the newest healthy steps (followed down, never up), as a robust z-score among the residuals
of the last ``window`` healthy steps. Fires when it reaches ``grad_norm_sigmas`` and the norm
is at least ``grad_norm_min_ratio`` times the trend. Silent until ``min_history`` healthy
steps were seen.

Must not fire on: the drift of the norm while the learning rate warms up or decays, noise
of small batches, a norm that falls. A zero norm is left out: it says nothing of the next.
"""

from __future__ import annotations

import math
from typing import Any

from monitoring.detectors.base import Detector, register
from monitoring.detectors.baseline import NO_BASELINE, Baseline
from monitoring.records import Incident, StepRecord

LEAST_SPREAD = 0.05
"""Least deviation of log(norm), five percent."""


@register
class GradNormSpike(Detector[Baseline]):
    """Fires when the gradient norm leaps."""

    name = "grad_norm_spike"

    def initial(self) -> Baseline:
        return NO_BASELINE

    def dump(self, state: Baseline) -> Any:
        return state.dump()

    def load(self, row: Any) -> Baseline:
        return Baseline.load(row)

    def observe(self, state: Baseline, record: StepRecord) -> tuple[Baseline, list[Incident]]:
        norm, config = record.grad_norm, self.config
        if record.skipped or not math.isfinite(norm) or norm <= 0.0:
            return state, []
        value = math.log(norm)
        trend = state.expected(record.step, value)
        following = state.add(record.step, value, trend, config.window)
        if not state.trusted(config.min_history):
            return following, []
        sigmas = state.sigmas(value - trend, LEAST_SPREAD)
        ratio = math.exp(value - trend)
        if sigmas < config.grad_norm_sigmas or ratio < config.grad_norm_min_ratio:
            return following, []
        return state, [self._incident(record, ratio, sigmas)]

    def _incident(self, record: StepRecord, ratio: float, sigmas: float) -> Incident:
        norm, usual = record.grad_norm, record.grad_norm / ratio
        return Incident(
            kind="grad_norm_spike",
            detector=self.name,
            attempt=record.attempt,
            timeline=record.timeline,
            step=record.step,
            onset_step=record.step,
            time=record.time,
            message=(
                f"Gradient norm {norm:.3g} in step {record.step}, {ratio:.1f} times its trend "
                f"of {usual:.3g} and {sigmas:.0f} robust deviations out "
                f"(limits {self.config.grad_norm_min_ratio:g}, {self.config.grad_norm_sigmas:g})."
            ),
            evidence={"grad_norm": norm, "trend": usual, "ratio": ratio, "sigmas": sigmas},
        )
