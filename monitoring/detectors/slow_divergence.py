"""A loss that rises without a spike, or stays above the best it was.

Sees: log(loss) (another scale for losses that can be negative: ``loss_scale``). Statistics:
medians of the newest four stretches of ``divergence_steps`` steps (the newest is the fast average,
all four the slow one), the noise between them (from the differences of neighbouring steps, which
no trend is in), and the lowest slow average: one that is slowly forgotten, the *best*, and one that
isn't, the *lowest*. Fires when the loss rose by ``divergence_rise`` over the four, in each of them,
in the newest still by more than noise, and more like a line than like a jump (half as much again
over stretches of half the steps); or when the fast average is ``plateau_rise`` above the best for
``plateau_steps`` steps, or ``drift_rise`` above the lowest for ``drift_steps``, then not again
before it has left that level too. Nothing below ``loss_min_rise_nats`` is a rise. While the
learning rate rises (warm-up, another cycle) twice the rise is allowed.

Must not fire on: a harder domain, which jumps and stays or falls; data that becomes harder by a
third over a thousand steps; single spikes, which no median sees; stretches of easy batches, which
no slow average sees, and their end; the noise of small batches, whatever its tails; noise of a
loss near 0.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np

from monitoring.detectors.base import Detector, register
from monitoring.detectors.baseline import MAD_TO_SIGMA, NO_VALUES, Window, median
from monitoring.detectors.loss_scale import relative_rise, scaled, signed_from_log, unscaled
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
    """log(loss) by step, or another scale (``signed``)."""
    rates: tuple[float, ...] = ()
    """Their learning rates."""
    best: float | None = None
    """Lowest slow average, slowly forgotten."""
    above: int = 0
    """Steps in a row that the fast average was above it by ``plateau_rise``."""
    above_since: int | None = None
    lowest: float | None = None
    """Lowest slow average."""
    far: int = 0
    """Steps in a row that the fast average was above it by ``drift_rise``."""
    far_since: int | None = None
    signed: bool = False
    """A loss was zero or less: its scale is that of ``loss_scale`` for such."""


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
            "lowest": state.lowest,
            "far": state.far,
            "far_since": state.far_since,
            "signed": state.signed,
        }

    def load(self, row: Any) -> SlowState:
        return SlowState(
            Window.load(row["losses"]),
            tuple(float(rate) for rate in row["rates"]),
            row["best"],
            int(row["above"]),
            row["above_since"],
            row["lowest"],
            int(row["far"]),
            row["far_since"],
            bool(row["signed"]),
        )

    def observe(self, state: SlowState, record: StepRecord) -> tuple[SlowState, list[Incident]]:
        if record.skipped or not math.isfinite(record.loss):
            return state, []
        if record.loss <= 0.0 and not state.signed:
            state = _signed(state)
        length = self.config.divergence_steps
        value = scaled(record.loss, state.signed)
        losses = state.losses.add(record.step, value, STRETCHES * length)
        lr = record.lr if math.isfinite(record.lr) else 0.0
        rates = (*state.rates, lr)[-STRETCHES * length :]
        state = replace(state, losses=losses, rates=rates)
        if len(losses) < length:
            return state, []
        slack = 2.0 if rates[-1] > RISING_LR * rates[0] else 1.0
        state, incidents = self._above_the_best(state, record, slack)
        values = np.asarray(losses.values)
        for stretch, times in ((length, 1.0), (length // 2, FASTER)):
            newest = values[-STRETCHES * stretch :]
            if incidents or len(newest) < STRETCHES * stretch:
                continue
            rise = _steady_rise(newest, stretch)
            fast = median(losses.values[-length:])
            least = times * slack * math.log1p(self.config.divergence_rise)
            if rise >= least and self._counts(fast, fast - rise, state.signed):
                incidents.append(self._rising(record, state, fast, rise, stretch))
        return state, incidents

    def _counts(self, high: float, low: float, signed: bool) -> bool:
        """Whether a rise is one in nats too."""
        rise = unscaled(high, signed) - unscaled(low, signed)
        return rise >= self.config.loss_min_rise_nats

    def _above_the_best(
        self, state: SlowState, record: StepRecord, slack: float
    ) -> tuple[SlowState, list[Incident]]:
        """The state with best and lowest, and what the loss's height above them says."""
        config = self.config
        fast = median(state.losses.values[-config.divergence_steps :])
        slow = median(state.losses.values)
        best = slow if state.best is None else state.best
        # Forgotten upwards only: easy batches would drag it down at once.
        best = min(best + max(0.0, fast - best) / FORGOTTEN_IN, slow)
        lowest = slow if state.lowest is None else min(state.lowest, slow)

        def row(low: float, rise: float, count: int, since: int | None) -> tuple[int, int | None]:
            if fast - low < rise or not self._counts(fast, low, state.signed):
                return 0, None
            return count + 1, record.step if since is None else since

        plateau, drift = math.log1p(config.plateau_rise), math.log1p(config.drift_rise)
        above, since = row(best, slack * plateau, state.above, state.above_since)
        far, far_since = row(lowest, drift, state.far, state.far_since)
        incidents = []
        if above >= config.plateau_steps and since is not None:
            limit = (config.plateau_rise, config.plateau_steps)
            incidents = [self._stays(record, state.signed, fast, "best", best, since, *limit)]
        elif far >= config.drift_steps and far_since is not None:
            limit = (config.drift_rise, config.drift_steps)
            incidents = [
                self._stays(record, state.signed, fast, "lowest", lowest, far_since, *limit)
            ]
        if incidents:
            # Told: what comes is measured against this level.
            best, lowest, above, far, since, far_since = fast, fast, 0, 0, None, None
        following = replace(
            state,
            best=best,
            above=above,
            above_since=since,
            lowest=lowest,
            far=far,
            far_since=far_since,
        )
        return following, incidents

    def _rising(
        self, record: StepRecord, state: SlowState, fast: float, rise: float, length: int
    ) -> Incident:
        onset = state.losses.steps[-(STRETCHES - 1) * length]
        now, before = (unscaled(value, state.signed) for value in (fast, fast - rise))
        risen = relative_rise(now, before)
        return self._incident(
            record,
            onset,
            f"The loss has risen by {100 * risen:.0f} % since step {onset}, steadily: its average "
            f"over {length} steps is {now:.3f} in step {record.step}, it was {before:.3f} (limit "
            f"{100 * self.config.divergence_rise:.0f} %).",
            {"rise": risen, "fast": now, "slow": before},
        )

    def _stays(
        self,
        record: StepRecord,
        signed: bool,
        fast: float,
        of: Literal["best", "lowest"],
        low: float,
        since: int,
        limit: float,
        steps: int,
    ) -> Incident:
        """A plateau above the best of late, or a drift away from the lowest ever: which of them is
        the name of what it is held against in the evidence."""
        onset = max(0, since - self.config.divergence_steps // 2)
        now, before = unscaled(fast, signed), unscaled(low, signed)
        rise = relative_rise(now, before)
        return self._incident(
            record,
            onset,
            f"The loss stays {100 * rise:.0f} % above the {of} it was, {before:.3f}: its average "
            f"over {self.config.divergence_steps} steps is {now:.3f} in step {record.step}, for "
            f"{steps} steps now (limit {100 * limit:.0f} %).",
            {"rise": rise, "fast": now, of: before},
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


def _signed(state: SlowState) -> SlowState:
    """The state on the scale of losses of either sign."""
    best, lowest = (None if v is None else signed_from_log(v) for v in (state.best, state.lowest))
    losses = state.losses.mapped(signed_from_log)
    return replace(state, losses=losses, best=best, lowest=lowest, signed=True)


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
