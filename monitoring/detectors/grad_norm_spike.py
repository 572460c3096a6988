"""Sudden rises of the gradient norm.

Sees: log(gradient norm) against its recent median. Statistic: robust z-score over the last
``window`` healthy steps. Fires when it reaches ``grad_norm_sigmas`` and the norm is at
least ``grad_norm_min_ratio`` times the median. Silent until ``min_history`` healthy steps
were seen.

Must not fire on: the drift of the norm while the learning rate warms up or decays, noise
of small batches, a norm that falls. A zero norm is left out: it says nothing of the next.
"""

from __future__ import annotations

import math
from typing import Any

from monitoring.detectors.base import Detector, register
from monitoring.detectors.baseline import Window, median, robust_z
from monitoring.records import Incident, StepRecord

LEAST_SPREAD = 0.05
"""Least deviation of log(norm), five percent."""


@register
class GradNormSpike(Detector[Window]):
    """Fires when the gradient norm leaps."""

    name = "grad_norm_spike"

    def initial(self) -> Window:
        return Window()

    def dump(self, state: Window) -> Any:
        return state.dump()

    def load(self, row: Any) -> Window:
        return Window.load(row)

    def observe(self, state: Window, record: StepRecord) -> tuple[Window, list[Incident]]:
        norm = record.grad_norm
        if record.skipped or not math.isfinite(norm) or norm <= 0.0:
            return state, []
        config = self.config
        value = math.log(norm)
        if len(state) < config.min_history:
            return state.add(record.step, value, config.window), []
        usual = math.exp(median(state.values))
        sigmas = robust_z(value, state.values, LEAST_SPREAD)
        if sigmas < config.grad_norm_sigmas or norm < config.grad_norm_min_ratio * usual:
            return state.add(record.step, value, config.window), []
        incident = Incident(
            kind="grad_norm_spike",
            detector=self.name,
            attempt=record.attempt,
            timeline=record.timeline,
            step=record.step,
            onset_step=record.step,
            time=record.time,
            message=(
                f"Gradient norm {norm:.3g} in step {record.step}, {norm / usual:.1f} times its "
                f"median of {usual:.3g} and {sigmas:.0f} robust deviations out "
                f"(limits {config.grad_norm_min_ratio:g}, {config.grad_norm_sigmas:g})."
            ),
            evidence={
                "grad_norm": norm,
                "median": usual,
                "ratio": norm / usual,
                "sigmas": sigmas,
            },
        )
        return state, [incident]
