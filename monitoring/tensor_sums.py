"""Per-tensor statistics of some ranks, added up so that others can be added later.

The ranks of one stage name the same tensors. Those of a node are added there, those of nodes on
the way to the supervisor, and ``columns_of`` reads the whole. Promises: pure, numpy only; any
grouping and any order give the same bits (counters are whole numbers, energies are summed in fixed
point); ranks are told apart only by who named a tensor first, which orders the names.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from monitoring.amax import COLUMNS, check_size
from monitoring.exact_sums import fixed_point, total
from monitoring.tensor_stats import TensorColumns

Names = tuple[str, ...]
Floats = npt.NDArray[np.float64]

_COLUMN = {name: i for i, name in enumerate(COLUMNS)}
_COUNTERS = [
    _COLUMN[name] for name in ("saturated", "underflowed", "nonfinite", "count", "uncalibrated")
]
_SATURATED, _UNDERFLOWED, _NONFINITE, _COUNT, _UNCALIBRATED = range(len(_COUNTERS))
_ENERGIES = [_COLUMN["signal"], _COLUMN["noise"]]


class ScaleMismatchError(ValueError):
    """Ranks quantized the same tensor with different scales where the recipe shares one.

    Under delayed scaling the amax is reduced over a stage's ranks, so a difference means
    that the reduction did not reach all of them.
    """

    def __init__(self, name: str, low: float, high: float) -> None:
        super().__init__(
            f"{name}: ranks used scales from {low:g} to {high:g}; delayed scaling shares one. "
            "Check that every rank of the stage takes part in the amax reduction."
        )
        self.name = name
        self.low = low
        self.high = high

    def __reduce__(self) -> tuple[type[ScaleMismatchError], tuple[str, float, float]]:
        return (type(self), (self.name, self.low, self.high))


@dataclass(frozen=True, slots=True)
class TensorSums:
    """Of the ranks that name the same tensors; arrays [tensors], never written in place."""

    first_rank: int
    amax: Floats
    low: Floats
    """Smallest scale."""
    high: Floats
    counters: Floats
    """[tensors, 5]: saturated, underflowed, nonfinite, count, uncalibrated; whole numbers."""
    energies: npt.NDArray[np.int64] | None
    """[tensors, 2, digits]: of signal and noise; None where neither was measured."""
    unmeasured: npt.NDArray[np.bool_] | None
    """[tensors, 2]: which of them had a value that wasn't finite; None where there was none."""


Sums = Mapping[Names, TensorSums]
"""By what is named, in no order."""


def sums_of(ranks: Iterable[tuple[int, Names, bytes]]) -> Sums:
    """Of the reports of some ranks, (rank, names, bytes), in the order of the ranks; ValueError
    when the bytes don't fit the names."""
    groups: dict[Names, list[tuple[int, bytes]]] = {}
    for rank, names, stats in ranks:
        check_size(stats, names)
        if names:
            groups.setdefault(names, []).append((rank, stats))
    return {names: _sums(names, found) for names, found in groups.items()}


def _sums(names: Names, found: Sequence[tuple[int, bytes]]) -> TensorSums:
    joined = b"".join(stats for _, stats in found)
    table = np.frombuffer(joined, dtype="<f4").reshape(len(found), len(names), len(COLUMNS))
    energies, unmeasured = None, None
    measured = table[:, :, _ENERGIES]
    if measured.any():
        finite = np.isfinite(measured)
        energies = fixed_point(np.where(finite, measured, np.float32(0.0))).sum(axis=0)
        unmeasured = None if finite.all() else ~finite.all(axis=0)
    scale = table[:, :, _COLUMN["scale"]].astype(np.float64)
    amax = table[:, :, _COLUMN["amax"]].max(axis=0).astype(np.float64)
    counters = table[:, :, _COUNTERS].sum(axis=0, dtype=np.float64)
    low, high = scale.min(axis=0), scale.max(axis=0)
    return TensorSums(found[0][0], np.maximum(amax, 0.0), low, high, counters, energies, unmeasured)


def added(parts: Iterable[Sums]) -> Sums:
    """All of them as one."""
    groups: dict[Names, list[TensorSums]] = {}
    for part in parts:
        for names, sums in part.items():
            groups.setdefault(names, []).append(sums)
    return {n: found[0] if len(found) == 1 else _added(found) for n, found in groups.items()}


def _added(found: Sequence[TensorSums]) -> TensorSums:
    energies = [sums.energies for sums in found if sums.energies is not None]
    unmeasured = [sums.unmeasured for sums in found if sums.unmeasured is not None]
    return TensorSums(
        min(sums.first_rank for sums in found),
        np.maximum.reduce([sums.amax for sums in found]),
        np.minimum.reduce([sums.low for sums in found]),
        np.maximum.reduce([sums.high for sums in found]),
        np.add.reduce([sums.counters for sums in found]),
        np.add.reduce(energies) if energies else None,
        np.logical_or.reduce(unmeasured) if unmeasured else None,
    )


def columns_of(sums: Sums, *, same_scale: bool = False) -> TensorColumns:
    """One step's statistics by tensor, in the order in which the ranks, one after the other, first
    name them. A NaN amax stays NaN.

    ``same_scale``: the recipe shares one scale over the ranks (delayed does), so that a
    difference raises ``ScaleMismatchError``. Otherwise the smallest scale is taken, the one that
    belongs to the largest amax. Percentages are of all values counted; 0 of none is 0. A tensor is
    calibrated where it is on every rank.
    """
    groups = sorted(sums.items(), key=lambda item: item[1].first_rank)
    order, places = _order(tuple(names for names, _ in groups))
    size = len(order)
    amax, counters = np.zeros(size), np.zeros((size, len(_COUNTERS)))
    low, high = np.full(size, np.inf), np.full(size, -np.inf)
    for where, (_, part) in zip(places, groups, strict=True):
        amax[where] = np.maximum(amax[where], part.amax)
        low[where] = np.minimum(low[where], part.low)
        high[where] = np.maximum(high[where], part.high)
        counters[where] += part.counters
    if same_scale and not np.array_equal(low, high, equal_nan=True):
        worst = int(np.flatnonzero(low != high)[0])
        raise ScaleMismatchError(order[worst], float(low[worst]), float(high[worst]))
    share = 100.0 / np.maximum(counters[:, _COUNT], 1.0)
    return TensorColumns(
        order,
        amax=amax,
        scale=low,
        saturated_pct=counters[:, _SATURATED] * share,
        underflow_pct=counters[:, _UNDERFLOWED] * share,
        nonfinite=np.nan_to_num(counters[:, _NONFINITE]).astype(np.int64),
        sqnr_db=_sqnr_db(places, [part for _, part in groups], size),
        calibrated=counters[:, _UNCALIBRATED] == 0,
    )


def merge(
    ranks: Iterable[tuple[Sequence[str], bytes]], *, same_scale: bool = False
) -> TensorColumns:
    """``columns_of`` the (names, bytes) of some ranks' reports, in the order of the ranks."""
    reported = ((rank, tuple(names), stats) for rank, (names, stats) in enumerate(ranks))
    return columns_of(sums_of(reported), same_scale=same_scale)


@lru_cache(maxsize=8)
def _order(
    groups: tuple[Names, ...],
) -> tuple[Names, tuple[npt.NDArray[np.int64], ...]]:
    """All names once, in order of first appearance, and where each group's stand among them.

    Ranks name the same tensors in every step; who compares names of two steps then compares
    one tuple with itself.
    """
    index: dict[str, int] = {}
    for names in groups:
        for name in names:
            index.setdefault(name, len(index))
    places = (np.array([index[name] for name in names], dtype=np.int64) for names in groups)
    return tuple(index), tuple(places)


def _sqnr_db(
    places: Sequence[npt.NDArray[np.int64]], parts: Sequence[TensorSums], size: int
) -> Floats:
    """Decibels by tensor; NaN where there is no signal, or none was measured."""
    known = [(w, p) for w, p in zip(places, parts, strict=True) if p.energies is not None]
    if not known:
        return np.full(size, np.nan)
    assert known[0][1].energies is not None
    digits = np.zeros((size, *known[0][1].energies.shape[1:]), np.int64)
    unmeasured = np.zeros((size, len(_ENERGIES)), np.bool_)
    for where, part in known:
        digits[where] += part.energies
        if part.unmeasured is not None:
            unmeasured[where] |= part.unmeasured
    signal, noise = total(digits).T
    with np.errstate(divide="ignore", invalid="ignore"):
        decibels = 10.0 * (np.log10(signal) - np.log10(noise))
    return np.where((signal > 0) & ~unmeasured.any(axis=1), decibels, np.nan)
