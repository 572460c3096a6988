"""Robust statistics of a series: median, MAD, a falling trend, a window of healthy values.

Promises: pure; a window is a value that can only be replaced. Medians and MADs bear up
to half of the values being wild. What lies far below is followed once it has lasted.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np
import numpy.typing as npt

MAD_TO_SIGMA = 1.4826
"""Standard deviation of a normal distribution over its median absolute deviation."""


@dataclass(frozen=True, slots=True)
class Window:
    """The newest healthy values of a series with the steps they belong to."""

    steps: tuple[int, ...] = ()
    values: tuple[float, ...] = ()

    def __len__(self) -> int:
        return len(self.values)

    def add(self, step: int, value: float, limit: int) -> Window:
        """With one value more, the oldest beyond ``limit`` dropped."""
        return Window((*self.steps, step)[-limit:], (*self.values, value)[-limit:])

    def mapped(self, scale: Callable[[float], float]) -> Window:
        """With ``scale`` of every value."""
        return Window(self.steps, tuple(map(scale, self.values)))

    def dump(self) -> list[list[float]]:
        return [list(self.steps), list(self.values)]

    @classmethod
    def load(cls, row: Sequence[Sequence[float]]) -> Window:
        steps, values = row
        return cls(tuple(int(s) for s in steps), tuple(float(v) for v in values))


NO_VALUES = Window()


def median(values: Sequence[float]) -> float:
    """Median; ValueError for no values."""
    if not values:
        raise ValueError("median of no values")
    ranked = sorted(values)
    middle = len(ranked) // 2
    return ranked[middle] if len(ranked) % 2 else 0.5 * (ranked[middle - 1] + ranked[middle])


def robust_z(value: float, values: Sequence[float], floor: float) -> float:
    """Distance of ``value`` from the median of ``values``, in robust standard deviations.

    ``floor``: least deviation taken, in the unit of the values, so that a series that
    hardly moves doesn't make every small step extreme.
    """
    centre = median(values)
    spread = MAD_TO_SIGMA * median([abs(v - centre) for v in values])
    return (value - centre) / max(spread, floor)


@lru_cache(maxsize=32)
def _pairs(count: int) -> tuple[npt.NDArray[np.intp], npt.NDArray[np.intp]]:
    """The later and the earlier one of all pairs of ``count`` values."""
    return np.tril_indices(count, -1)


def falling_trend(window: Window, step: int, length: int, reach: int) -> float:
    """Value expected at ``step`` from the newest ``length`` values, were the trend to go on.

    The slope is Theil–Sen's (median over all pairs), never above zero: a series that falls
    is followed down, one that rises is held against its level. It is extended by at most
    ``reach`` steps beyond the newest value, for a gap must not carry it away.
    """
    x = np.asarray(window.steps[-length:], dtype=np.float64)
    y = np.asarray(window.values[-length:], dtype=np.float64)
    if len(y) < 2:
        return float(y[-1])
    late, early = _pairs(len(y))
    slope = min(0.0, median(((y[late] - y[early]) / (x[late] - x[early])).tolist()))
    at = min(float(step), float(x[-1]) + reach)
    return median((y + slope * (at - x)).tolist())


TREND_STEPS = 16
"""Healthy steps that a trend is taken from."""
REACH = 4
"""Steps a trend is extended at most, across steps that were left out."""
LASTING = 32
"""Steps in a row far below a trend, from which that is the new normal. A stretch of easy batches,
or of broken ones, ends before; taken in at once it would make the good ones after it a spike."""


@dataclass(frozen=True, slots=True)
class Baseline:
    """What a series usually does: its healthy values, and how far they were from their trend."""

    values: Window = NO_VALUES
    residuals: Window = NO_VALUES
    lower: Window = NO_VALUES
    """The present row of values far below the trend, which don't count yet."""

    def trusted(self, min_history: int) -> bool:
        """Whether enough healthy steps were seen to judge the next."""
        return len(self.values) >= min_history and len(self.residuals) >= 2

    def expected(self, step: int, value: float) -> float:
        """The trend's value at ``step``; ``value`` itself while there is no trend yet."""
        if len(self.values) < 2:
            return value
        return falling_trend(self.values, step, TREND_STEPS, REACH)

    def sigmas(self, residual: float, floor: float) -> float:
        """The residual among the earlier ones, in robust deviations of at least ``floor``."""
        return robust_z(residual, self.residuals.values, floor)

    def add(self, step: int, value: float, expected: float, limit: int) -> Baseline:
        """With one healthy value more."""
        residuals = self.residuals
        if len(self.values) >= 2:
            residuals = residuals.add(step, value - expected, limit)
        return Baseline(self.values.add(step, value, limit), residuals)

    def add_lower(self, step: int, value: float, lasting: int) -> Baseline:
        """With one more that is far below the trend: after ``lasting`` in a row they are it."""
        lower = self.lower.add(step, value, lasting)
        if len(lower) < lasting:
            return replace(self, lower=lower)
        return Baseline(lower, self.residuals)

    def rescaled(self, scale: Callable[[float], float]) -> Baseline:
        """With ``scale`` of every value, and the residuals that it makes of them."""
        at = dict(zip(self.values.steps, self.values.values, strict=True))
        pairs = zip(self.residuals.steps, self.residuals.values, strict=True)
        kept = [(step, residual) for step, residual in pairs if step in at]
        return Baseline(
            self.values.mapped(scale),
            Window(
                tuple(step for step, _ in kept),
                tuple(scale(at[step]) - scale(at[step] - residual) for step, residual in kept),
            ),
            self.lower.mapped(scale),
        )

    def dump(self) -> list[list[list[float]]]:
        return [self.values.dump(), self.residuals.dump(), self.lower.dump()]

    @classmethod
    def load(cls, row: Sequence[Sequence[Sequence[float]]]) -> Baseline:
        return cls(*map(Window.load, row))


NO_BASELINE = Baseline()
