"""Sudden rises of the loss.

Sees: log(loss) above its trend. Statistic: the residual from a Theil–Sen trend of the
newest healthy steps (followed down, never up), as a robust z-score among the residuals
of the last ``window`` healthy steps. Fires when the z-score reaches ``loss_sigmas`` and
the loss is ``loss_min_rise`` (a fraction) above the trend for ``loss_patience`` steps, or
``HEAVY`` times that in one. Silent until ``min_history`` healthy steps were seen.

Must not fire on: the fast fall of the first hundred steps, the bend after it, batch
noise, a domain that is a little harder. The fall doesn't blind it either, for residuals
from the trend stay small while the loss itself runs through octaves.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from monitoring.detectors.base import Detector, register
from monitoring.detectors.baseline import NO_BASELINE, Baseline
from monitoring.records import Incident, StepRecord

LEAST_SPREAD = 0.01
"""Least deviation of log(loss), one percent."""
HEAVY = 1.5
"""Times ``loss_min_rise`` from which one step is enough."""
ONSET_SHARE = 0.5
"""Share of the limits above which the steps right before a spike are counted to it."""


@dataclass(frozen=True, slots=True)
class LossState:
    """The baseline of log(loss); where an unusual stretch began, if in one."""

    baseline: Baseline = NO_BASELINE
    unusual_since: int | None = None
    run: int = 0
    """Steps in a row beyond both limits."""


@register
class LossSpike(Detector[LossState]):
    """Fires when the loss leaves its trend upwards."""

    name = "loss_spike"

    def initial(self) -> LossState:
        return LossState()

    def dump(self, state: LossState) -> Any:
        return [state.baseline.dump(), state.unusual_since, state.run]

    def load(self, row: Any) -> LossState:
        baseline, since, *run = row
        return LossState(Baseline.load(baseline), since, *run)

    def observe(self, state: LossState, record: StepRecord) -> tuple[LossState, list[Incident]]:
        if record.skipped or not math.isfinite(record.loss) or record.loss <= 0.0:
            return state, []
        config, baseline = self.config, state.baseline
        value = math.log(record.loss)
        trend = baseline.expected(record.step, value)
        residual = value - trend
        following = baseline.add(record.step, value, trend, config.window)
        if not baseline.trusted(config.min_history):
            return LossState(following), []
        sigmas = baseline.sigmas(residual, LEAST_SPREAD)
        # 1 at both limits together, less below either.
        excess = min(sigmas / config.loss_sigmas, residual / math.log1p(config.loss_min_rise))
        if excess < ONSET_SHARE:
            return LossState(following), []
        since = record.step if state.unusual_since is None else state.unusual_since
        if excess < 1.0:
            return LossState(following, since), []
        leaping = LossState(baseline, since, state.run + 1)
        rise = math.expm1(residual)
        if leaping.run < config.loss_patience and rise < HEAVY * config.loss_min_rise:
            return leaping, []
        return leaping, [self._incident(record, math.exp(trend), sigmas, since)]

    def _incident(self, record: StepRecord, trend: float, sigmas: float, since: int) -> Incident:
        rise = record.loss / trend - 1.0
        return self.incident(
            record,
            onset_step=since,
            message=(
                f"Loss {record.loss:.3f} in step {record.step}, {100 * rise:.0f} % above its "
                f"trend of {trend:.3f} and {sigmas:.0f} robust deviations out "
                f"(limits {100 * self.config.loss_min_rise:.0f} %, {self.config.loss_sigmas:g})."
            ),
            evidence={"loss": record.loss, "trend": trend, "rise": rise, "sigmas": sigmas},
        )
