"""Sudden rises of the loss.

Sees: log(loss) above its trend. Statistic: the residual from a Theil–Sen trend of the
newest healthy steps (followed down, never up), as a robust z-score among the residuals
of the last ``window`` healthy steps. Fires when the z-score reaches ``loss_sigmas`` and
the loss is ``loss_min_rise`` (a fraction) above the trend. Silent until ``min_history``
healthy steps were seen.

Must not fire on: the fast fall of the first hundred steps, the bend after it, batch
noise, a domain that is a little harder. The fall doesn't blind it either, for residuals
from the trend stay small while the loss itself runs through octaves.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from monitoring.detectors.base import Detector, register
from monitoring.detectors.baseline import NO_VALUES, Window, falling_trend, robust_z
from monitoring.records import Incident, StepRecord

TREND_STEPS = 16
"""Healthy steps that the trend is taken from."""
REACH = 4
"""Steps the trend is extended at most, across steps that were left out."""
LEAST_SPREAD = 0.01
"""Least deviation of log(loss), one percent."""
ONSET_SHARE = 0.5
"""Share of the limits above which the steps right before a spike are counted to it."""


@dataclass(frozen=True, slots=True)
class LossState:
    """Healthy log(loss) and its residuals; where an unusual stretch began, if in one."""

    losses: Window = NO_VALUES
    residuals: Window = NO_VALUES
    unusual_since: int | None = None


@register
class LossSpike(Detector[LossState]):
    """Fires when the loss leaves its trend upwards."""

    name = "loss_spike"

    def initial(self) -> LossState:
        return LossState()

    def dump(self, state: LossState) -> Any:
        return [state.losses.dump(), state.residuals.dump(), state.unusual_since]

    def load(self, row: Any) -> LossState:
        losses, residuals, since = row
        return LossState(Window.load(losses), Window.load(residuals), since)

    def observe(self, state: LossState, record: StepRecord) -> tuple[LossState, list[Incident]]:
        if record.skipped or not math.isfinite(record.loss) or record.loss <= 0.0:
            return state, []
        config = self.config
        value = math.log(record.loss)
        if len(state.losses) < 2:
            losses = state.losses.add(record.step, value, config.window)
            return LossState(losses, state.residuals), []
        trend = falling_trend(state.losses, record.step, TREND_STEPS, REACH)
        residual = value - trend
        known = len(state.losses) >= config.min_history and len(state.residuals) >= 2
        sigmas = robust_z(residual, state.residuals.values, LEAST_SPREAD) if known else 0.0
        least = math.log1p(config.loss_min_rise)
        spike = known and sigmas >= config.loss_sigmas and residual >= least
        unusual = spike or (
            known and sigmas >= ONSET_SHARE * config.loss_sigmas and residual >= ONSET_SHARE * least
        )
        began = record.step if state.unusual_since is None else state.unusual_since
        since = began if unusual else None
        if spike:
            incident = self._incident(record, math.exp(trend), sigmas, began)
            return LossState(state.losses, state.residuals, began), [incident]
        return LossState(
            state.losses.add(record.step, value, config.window),
            state.residuals.add(record.step, residual, config.window),
            since,
        ), []

    def _incident(self, record: StepRecord, trend: float, sigmas: float, since: int) -> Incident:
        rise = record.loss / trend - 1.0
        return Incident(
            kind="loss_spike",
            detector=self.name,
            attempt=record.attempt,
            timeline=record.timeline,
            step=record.step,
            onset_step=since,
            time=record.time,
            message=(
                f"Loss {record.loss:.3f} in step {record.step}, {100 * rise:.0f} % above its "
                f"trend of {trend:.3f} and {sigmas:.0f} robust deviations out "
                f"(limits {100 * self.config.loss_min_rise:.0f} %, {self.config.loss_sigmas:g})."
            ),
            evidence={"loss": record.loss, "trend": trend, "rise": rise, "sigmas": sigmas},
        )
