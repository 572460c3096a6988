"""A loss that rises without a spike, or stays above the best it was.

Sees: log(loss). Statistics: medians of the newest four stretches of ``divergence_steps`` steps
(the newest is the fast average, all four the slow one), the noise between them (from the
differences of neighbouring steps, which no trend is in), and the lowest fast average, which is
slowly forgotten. Fires when the loss rose by ``divergence_rise`` over the four, in each of them,
in the newest still by more than noise, and more like a line than like a jump (half as much again
over stretches of half the steps); or when the fast average is ``plateau_rise`` above the best for
``plateau_steps`` steps, then not again before it has left that level too. While the learning
rate rises (warm-up, another cycle) twice the rise is allowed.

Must not fire on: a harder domain, which jumps and stays or falls; single spikes, which no median
sees; the noise of small batches, whatever its tails.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from monitoring.detectors.base import Detector, register
from monitoring.detectors.baseline import MAD_TO_SIGMA, NO_VALUES, Window, median
from monitoring.records import Incident, StepRecord

FORGOTTEN_IN = 512
"""Steps in which most of a best that the loss doesn't come back to is forgotten: data that were
easier for a while are no measure for ever."""
STRETCHES = 4
FASTER = 1.5
"""Times the rise that stretches of half the steps must show: a loss that rises by a percent a
step is not waited for."""
EACH_SHARE = 1 / 6
"""Share of the rise that every stretch must have, of the third that even growth has."""
MOST_NOISE = 6.0
"""Deviations of the difference of two medians that the whole rise must have."""
NEWEST_NOISE = 3.0
"""The same of the newest stretch alone."""
MEDIAN_TO_MEAN = 1.2533
"""Standard deviation of a median over that of the mean, of normal values."""
RISING_LR = 1.1
"""Ratio of the newest to the oldest learning rate from which it rises."""


@dataclass(frozen=True, slots=True)
class SlowState:
    """The newest four stretches, and what the loss has been at its best."""

    losses: Window = NO_VALUES
    """log(loss) by step."""
    rates: tuple[float, ...] = ()
    """Their learning rates."""
    best: float | None = None
    """Lowest fast average."""
    above: int = 0
    """Steps in a row that the fast average was above it by ``plateau_rise``."""
    above_since: int | None = None


@register
class SlowDivergence(Detector[SlowState]):
    """Fires when the loss goes the wrong way for good, however slowly."""

    name = "slow_divergence"

    def initial(self) -> SlowState:
        return SlowState()

    def dump(self, state: SlowState) -> Any:
        return {
            "losses": state.losses.dump(),
            "rates": list(state.rates),
            "best": state.best,
            "above": state.above,
            "above_since": state.above_since,
        }

    def load(self, row: Any) -> SlowState:
        return SlowState(
            Window.load(row["losses"]),
            tuple(float(rate) for rate in row["rates"]),
            row["best"],
            int(row["above"]),
            row["above_since"],
        )

    def observe(self, state: SlowState, record: StepRecord) -> tuple[SlowState, list[Incident]]:
        if record.skipped or not math.isfinite(record.loss) or record.loss <= 0.0:
            return state, []
        length = self.config.divergence_steps
        losses = state.losses.add(record.step, math.log(record.loss), STRETCHES * length)
        lr = record.lr if math.isfinite(record.lr) else 0.0
        rates = (*state.rates, lr)[-STRETCHES * length :]
        if len(losses) < length:
            return SlowState(losses, rates, state.best), []
        values = np.asarray(losses.values)
        fast = median(losses.values[-length:])
        best = fast if state.best is None else state.best
        best = min(best + (fast - best) / FORGOTTEN_IN, fast)
        slack = 2.0 if rates[-1] > RISING_LR * rates[0] else 1.0

        incidents = []
        over = fast - best
        if over >= slack * math.log1p(self.config.plateau_rise):
            above = state.above + 1
            since = record.step if state.above_since is None else state.above_since
        else:
            above, since = 0, None
        if above >= self.config.plateau_steps and since is not None:
            incidents.append(self._plateau(record, fast, best, since))
            best, above, since = fast, 0, None
        for stretch, times in ((length, 1.0), (length // 2, FASTER)):
            newest = values[-STRETCHES * stretch :]
            if incidents or len(newest) < STRETCHES * stretch:
                continue
            rise = _steady_rise(newest, stretch)
            if rise >= times * slack * math.log1p(self.config.divergence_rise):
                incidents.append(self._rising(record, losses, rise, stretch))
        return SlowState(losses, rates, best, above, since), incidents

    def _rising(self, record: StepRecord, losses: Window, rise: float, length: int) -> Incident:
        onset = losses.steps[-(STRETCHES - 1) * length]
        fast = median(losses.values[-length:])
        percent = 100 * math.expm1(rise)
        return self._incident(
            record,
            onset,
            f"The loss has risen by {percent:.0f} % since step {onset}, steadily: its average over "
            f"{length} steps is {math.exp(fast):.3f} in step {record.step}, it was "
            f"{math.exp(fast - rise):.3f} (limit {100 * self.config.divergence_rise:.0f} %).",
            {"rise": math.expm1(rise), "fast": math.exp(fast), "slow": math.exp(fast - rise)},
        )

    def _plateau(self, record: StepRecord, fast: float, best: float, since: int) -> Incident:
        onset = max(0, since - self.config.divergence_steps // 2)
        rise = math.expm1(fast - best)
        return self._incident(
            record,
            onset,
            f"The loss stays {100 * rise:.0f} % above the best it was, {math.exp(best):.3f}: its "
            f"average over {self.config.divergence_steps} steps is {math.exp(fast):.3f} in step "
            f"{record.step}, for {self.config.plateau_steps} steps now (limit "
            f"{100 * self.config.plateau_rise:.0f} %).",
            {"rise": rise, "fast": math.exp(fast), "best": math.exp(best)},
        )

    def _incident(
        self, record: StepRecord, onset: int, message: str, evidence: dict[str, float]
    ) -> Incident:
        return self.incident(
            record,
            onset_step=onset,
            message=message,
            evidence={"loss": record.loss, **evidence},
        )


def _steady_rise(values: np.typing.NDArray[np.float64], length: int) -> float:
    """Rise of log(loss) over the four stretches where it rose in each; else 0."""
    medians = [median(stretch) for stretch in values.reshape(STRETCHES, length).tolist()]
    steps = np.diff(medians)
    rise = medians[-1] - medians[0]
    if rise <= 0.0 or steps.min() < EACH_SHARE * rise:
        return 0.0
    if _left_by_a_line(values) >= _left_by_a_jump(values):
        return 0.0
    differences = np.diff(values)
    spread = MAD_TO_SIGMA * median(np.abs(differences - median(differences.tolist())).tolist())
    # Of a difference of neighbours the variance is twice a step's; so it is of two medians.
    noise = MEDIAN_TO_MEAN * spread / math.sqrt(length)
    return rise if rise >= MOST_NOISE * noise and steps[-1] >= NEWEST_NOISE * noise else 0.0


def _left_by_a_line(values: np.typing.NDArray[np.float64]) -> float:
    """Sum of squares that the best straight line leaves."""
    x = np.arange(len(values)) - (len(values) - 1) / 2
    y = values - values.mean()
    return float(y @ y - (x @ y) ** 2 / (x @ x))


def _left_by_a_jump(values: np.typing.NDArray[np.float64]) -> float:
    """Sum of squares that the best jump from one level to another leaves."""
    y = values - values.mean()
    before = np.cumsum(y)[:-1]
    count = np.arange(1, len(y))
    return float(y @ y - (before**2 * (1 / count + 1 / (len(y) - count))).max())
