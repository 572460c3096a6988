"""Which tensors' amax grows, and how fast: what a scale that follows amax doesn't show.

A scale is made from amax, so that the room left below the format's maximum is next to none in
every healthy job; what comes before trouble is an amax that keeps growing. Promises: pure; growth
is between the means of the older and the newer half of the records, so that the noise of single
steps cancels; nothing is said of fewer than two records.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from monitoring.records import StepRecord
from monitoring.tensor_stats import TensorColumns

HALF_LIFE = 64
"""Records after which one weighs half as much in what is usual."""
WEIGHT = 1.0 - 0.5 ** (1.0 / HALF_LIFE)


@dataclass(frozen=True, slots=True)
class Growth:
    """Of the tensors of the newest record."""

    names: tuple[str, ...]
    octaves: npt.NDArray[np.float64]
    """[tensors]; NaN where it isn't known."""
    steps: int
    """Between the first record and the newest."""


def growth(records: Sequence[StepRecord]) -> Growth | None:
    """How the amax of the newest record's tensors grew over ``records``, oldest first.

    Records without statistics, or of other tensors than the newest's, don't count.
    """
    told = [(record.step, TensorColumns.of(record.tensors)) for record in records if record.tensors]
    if not told:
        return None
    names = told[-1][1].names
    told = [(step, columns) for step, columns in told if columns.names == names]
    if len(told) < 2:
        return None
    amax = np.stack([columns.amax for _, columns in told])
    calibrated = np.stack([columns.calibrated for _, columns in told])
    known = calibrated & np.isfinite(amax) & (amax > 0)
    logs = np.where(known, np.log2(np.where(known, amax, 1.0)), np.nan)
    half = len(told) // 2
    older, newer = _means(logs[:half]), _means(logs[-half:])
    return Growth(names, newer - older, told[-1][0] - told[0][0])


class UsualAmax:
    """What each tensor's amax usually is, over the records that came so far, and how far above
    that a record's is."""

    def __init__(self) -> None:
        self._names: tuple[str, ...] = ()
        self._usual: npt.NDArray[np.float64] = np.empty(0)
        """[tensors], log2; NaN before it is known."""

    def rise(
        self, columns: TensorColumns, counted: npt.NDArray[np.bool_]
    ) -> npt.NDArray[np.float64]:
        """Octaves [tensors] above the usual; 0 where there is none yet, or not ``counted``, inf
        for an amax that isn't finite. The record then is one of those that came."""
        if columns.names != self._names:
            before = dict(zip(self._names, self._usual.tolist(), strict=True))
            self._usual = np.array([before.get(name, np.nan) for name in columns.names])
            self._names = columns.names
        known = counted & np.isfinite(columns.amax) & (columns.amax > 0)
        logs = np.log2(np.where(known, columns.amax, 1.0))
        usual = np.where(np.isnan(self._usual), logs, self._usual)
        rise = np.where(known, logs - usual, 0.0)
        self._usual = np.where(known, usual + WEIGHT * (logs - usual), self._usual)
        return np.where(counted & ~np.isfinite(columns.amax), np.inf, rise)


def octaves(value: float) -> str:
    """``+0.3``, ``-1.2``; never a zero with a minus."""
    return f"{round(value, 1) + 0.0:+.1f}"


def _means(logs: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Of each tensor over the records that know it; NaN where none does."""
    counted = (~np.isnan(logs)).sum(axis=0)
    with np.errstate(invalid="ignore"):
        means: npt.NDArray[np.float64] = np.nansum(logs, axis=0) / counted
    return means
