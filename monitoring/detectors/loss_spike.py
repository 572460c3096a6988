"""Sudden rises of the loss.

Sees: log(loss) above its trend (another scale for losses that can be negative: ``loss_scale``).
Statistic: the residual from a Theil–Sen trend of the newest healthy steps (followed down, never
up), as a robust z-score among the residuals of the last ``window`` healthy steps. Fires when the
z-score reaches ``loss_sigmas`` and the loss is ``loss_min_rise`` (a fraction) and
``loss_min_rise_nats`` above the trend for ``loss_patience`` steps, or ``HEAVY`` times both rises
in one.

Until ``min_history`` healthy steps were seen that is no measure. Then, also while things settle,
it fires for a loss that is ``loss_first_ratio`` times the first losses (``FEW_RATIO`` times the
very first), or, at any time, ``loss_guessing_ratio`` times what guessing costs and risen to there,
for ``EARLY_PATIENCE`` steps. Such steps enter no baseline either.

A loss that is as far below the trend enters its baseline when that has lasted: a stretch of easy
or broken batches doesn't make the good ones after it a spike.

Must not fire on: the fast fall of the first hundred steps, the bend after it, batch noise, a
domain that is a little harder, a fresh model that starts above guessing, noise of a loss near 0,
the end of easy batches. The fall doesn't blind it either, for residuals from the trend stay small
while the loss itself runs through octaves.
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
    median,
    robust_z,
)
from monitoring.detectors.loss_scale import relative_rise, scaled, signed_from_log, unscaled
from monitoring.records import Incident, StepRecord

LEAST_SPREAD = 0.01
"""Least deviation of log(loss), one percent."""
HEAVY = 1.5
"""Times ``loss_min_rise`` and ``loss_min_rise_nats`` from which one step is enough."""
ONSET_SHARE = 0.5
"""Share of the limits above which the steps right before a spike are counted to it."""
EARLY_PATIENCE = 3
"""Steps that a loss must be too high by itself, with no trend that says so."""
EARLY_NATS = 3.0
"""Times ``loss_min_rise_nats`` that an early leap must have: less is known of the noise."""
FEW = 4
"""First losses from which their noise can be told, and single ones of them don't count."""
FEW_RATIO = 3.0
"""Times the first losses that a loss must be while they are fewer."""
EARLY_FALL = 2.0
"""Ratio of the trend to a loss from which it is far below, while their noise is hardly known."""
TELLING = 8
"""Losses from which it is: what is far below stays out on less than what is an incident."""
RISEN = 1.3
"""Times the very first loss that one far above guessing must be: models that begin up there come
down."""


@dataclass(frozen=True, slots=True)
class LossState:
    """The baseline of log(loss); where an unusual stretch began, if in one."""

    baseline: Baseline = NO_BASELINE
    unusual_since: int | None = None
    run: int = 0
    """Steps in a row beyond the limits."""
    first: float | None = None
    """The very first loss."""
    signed: bool = False
    """A loss was zero or less: its scale is that of ``loss_scale`` for such."""


@register
class LossSpike(Detector[LossState]):
    """Fires when the loss leaves its trend upwards."""

    name = "loss_spike"

    def initial(self) -> LossState:
        return LossState()

    def dump(self, state: LossState) -> Any:
        return [
            state.baseline.dump(), state.unusual_since, state.run, state.first, state.signed
        ]  # fmt: skip

    def load(self, row: Any) -> LossState:
        baseline, *rest = row
        return LossState(Baseline.load(baseline), *rest)

    def counts_while_settling(self, incident: Incident) -> bool:
        # Nothing that settles takes the loss to twice its first or beyond guessing.
        return "too_high" in incident.evidence

    def observe(self, state: LossState, record: StepRecord) -> tuple[LossState, list[Incident]]:
        if record.skipped or not math.isfinite(record.loss):
            return state, []
        state = self._on_its_scale(state, record.loss)
        config, baseline = self.config, state.baseline
        value = scaled(record.loss, state.signed)
        trend = baseline.expected(record.step, value)
        residual = value - trend
        sigmas = baseline.sigmas(residual, LEAST_SPREAD) if len(baseline.residuals) >= 2 else 0.0
        usual = unscaled(trend, state.signed)
        # 1 at all limits together, less below any.
        excess = min(
            sigmas / config.loss_sigmas,
            residual / math.log1p(config.loss_min_rise),
            (record.loss - usual) / config.loss_min_rise_nats,
        )
        trusted = baseline.trusted(config.min_history)
        too_high = self._too_high(state, record.loss, trusted)
        spiking = trusted and excess >= 1.0
        if not spiking and too_high is None:
            if self._far_below(baseline, residual, sigmas, usual - record.loss):
                lasting = max(LASTING, config.min_history)
                lower = baseline.add_lower(record.step, value, lasting)
                return replace(state, baseline=lower, unusual_since=None, run=0), []
            following = baseline.add(record.step, value, trend, config.window)
            since = self._since(state, record) if excess >= ONSET_SHARE else None
            return replace(state, baseline=following, unusual_since=since, run=0), []
        since = self._since(state, record)
        baseline = replace(baseline, lower=NO_VALUES)
        leaping = replace(state, baseline=baseline, unusual_since=since, run=state.run + 1)
        if spiking:
            heavy = residual >= math.log1p(HEAVY * config.loss_min_rise)
            heavy &= record.loss - usual >= HEAVY * config.loss_min_rise_nats
            if heavy or leaping.run >= config.loss_patience:
                return leaping, [self._spike(record, usual, sigmas, since)]
        if too_high is not None and leaping.run >= max(EARLY_PATIENCE, config.loss_patience):
            return leaping, [self._early(record, *too_high, since)]
        return leaping, []

    def _on_its_scale(self, state: LossState, loss: float) -> LossState:
        if loss <= 0.0 and not state.signed:
            baseline = state.baseline.rescaled(signed_from_log)
            state = replace(state, baseline=baseline, signed=True)
        return replace(state, first=loss) if state.first is None else state

    def _since(self, state: LossState, record: StepRecord) -> int:
        return record.step if state.unusual_since is None else state.unusual_since

    def _too_high(self, state: LossState, loss: float, trusted: bool) -> tuple[float, str] | None:
        """What the loss is too high against without any trend, in nats and in words."""
        config, first = self.config, state.first
        if first is None:
            return None
        guessing = self.guessing_loss
        # A rise is asked for too: a model that begins up there comes down.
        if guessing is not None and loss >= max(
            config.loss_guessing_ratio * guessing, RISEN * first
        ):
            return guessing, "what guessing costs"
        seen = state.baseline.values.values
        if trusted or not seen:
            return None
        value = scaled(loss, state.signed)
        before = max(median(seen), scaled(first, state.signed))
        usual = unscaled(before, state.signed)
        few = len(seen) < FEW
        if few and guessing is not None and loss < guessing:
            # The first batches may have been easy ones.
            return None
        ratio = max(config.loss_first_ratio, FEW_RATIO if few else 0.0)
        if value - before < math.log(ratio):
            return None
        if loss - usual < EARLY_NATS * config.loss_min_rise_nats:
            return None
        if not few and robust_z(value, seen, LEAST_SPREAD) < config.loss_sigmas / 2:
            return None
        return usual, "the first losses"

    def _far_below(self, baseline: Baseline, residual: float, sigmas: float, nats: float) -> bool:
        """Whether a loss is as far below the trend as a spike is above it."""
        config = self.config
        if nats < config.loss_min_rise_nats:
            return False
        if len(baseline.values) < TELLING:
            return len(baseline.values) >= FEW and -residual >= math.log(EARLY_FALL)
        fallen = -residual >= math.log1p(config.loss_min_rise)
        return fallen and -sigmas >= config.loss_sigmas

    def _early(self, record: StepRecord, usual: float, words: str, since: int) -> Incident:
        times = f"{record.loss / usual:.1f} times " if usual > 0.0 else "far above "
        return self.incident(
            record,
            onset_step=since,
            message=(
                f"Loss {record.loss:.3f} in step {record.step}, {times}{words}, {usual:.3f}, and "
                f"too high since step {since} (limits {self.config.loss_first_ratio:g} times the "
                f"first losses, {self.config.loss_guessing_ratio:g} times guessing)."
            ),
            evidence={
                "loss": record.loss,
                "too_high": usual,
                "rise": relative_rise(record.loss, usual),
            },
        )

    def _spike(self, record: StepRecord, trend: float, sigmas: float, since: int) -> Incident:
        rise = relative_rise(record.loss, trend)
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
