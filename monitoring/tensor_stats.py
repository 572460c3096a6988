"""FP8 statistics of a step's tensors: of one as a value, of all as columns.

Promises: ``TensorColumns`` reads as a mapping from ``"{layer}/{role}"`` to ``TensorStats`` and
goes through JSON as one without loss; what looks at all tensors of a step takes its arrays, so
that no object a tensor is made on the way from the ranks to the detectors.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Row = list[float | str]
"""A tensor's statistics as strict JSON: amax, scale, percent saturated, percent underflown,
non-finite values; then, where it is known or the scale isn't calibrated, the SQNR; then 0 where
the scale isn't calibrated."""


def encode_float(value: float) -> float | str:
    """A float as strict JSON holds it: non-finite ones as ``"nan"``, ``"inf"``, ``"-inf"``."""
    return value if math.isfinite(value) else str(value)


@dataclass(frozen=True, slots=True)
class TensorStats:
    """FP8 statistics of one operand of one layer in one step, over all batches and replicas."""

    amax: float
    """Largest magnitude before quantization."""
    scale: float
    """Multiplier applied before the cast: fp8 value = x * scale."""
    saturated_pct: float
    """Percent of values clamped to the format's maximum."""
    underflow_pct: float
    """Percent of non-zero values that became zero."""
    nonfinite: int
    """Values that were NaN or infinite."""
    sqnr_db: float | None = None
    """Signal to quantization-noise ratio in decibels, inf where rounding took nothing; None
    where the spec doesn't ask for it, or nothing was quantized."""
    calibrated: bool = True
    """Whether the scale was made from data: a delayed scale before its first update is 1, as
    others may be that fit."""


class TensorColumns(Mapping[str, TensorStats]):
    """Of all tensors of a step, an array a field [tensors], which are never written in place."""

    __slots__ = (
        *("names", "amax", "scale", "saturated_pct", "underflow_pct"),
        *("nonfinite", "sqnr_db", "calibrated", "_index"),
    )

    def __init__(
        self,
        names: tuple[str, ...],
        *,
        amax: Floats,
        scale: Floats,
        saturated_pct: Floats,
        underflow_pct: Floats,
        nonfinite: npt.NDArray[np.int64],
        sqnr_db: Floats,
        calibrated: npt.NDArray[np.bool_],
    ) -> None:
        """``names`` in the order of the arrays, each once; ``sqnr_db`` is NaN for unknown, the
        rest as in ``TensorStats``."""
        self.names = names
        self.amax = amax
        self.scale = scale
        self.saturated_pct = saturated_pct
        self.underflow_pct = underflow_pct
        self.nonfinite = nonfinite
        self.sqnr_db = sqnr_db
        self.calibrated = calibrated
        self._index: dict[str, int] | None = None

    @classmethod
    def of(cls, tensors: Mapping[str, TensorStats]) -> TensorColumns:
        """The columns of any mapping; those that are columns already are themselves."""
        if isinstance(tensors, cls):
            return tensors
        stats = tensors.values()

        def floats(field: str) -> Floats:
            return np.array([getattr(s, field) for s in stats], dtype=np.float64)

        unknown = math.nan
        return cls(
            tuple(tensors),
            amax=floats("amax"),
            scale=floats("scale"),
            saturated_pct=floats("saturated_pct"),
            underflow_pct=floats("underflow_pct"),
            nonfinite=np.array([s.nonfinite for s in stats], dtype=np.int64),
            sqnr_db=np.array(
                [unknown if s.sqnr_db is None else s.sqnr_db for s in stats], dtype=np.float64
            ),
            calibrated=np.array([s.calibrated for s in stats], dtype=np.bool_),
        )

    @classmethod
    def from_json(cls, rows: Mapping[str, Row]) -> TensorColumns:
        """The inverse of ``to_json``; ValueError or TypeError for other rows."""
        padded = np.full((len(rows), 7), np.nan)
        for i, row in enumerate(rows.values()):
            padded[i, : len(row)] = [float(value) for value in row]
        amax, scale, saturated, underflow, nonfinite, sqnr_db, calibrated = padded.T
        return cls(
            tuple(rows),
            amax=amax,
            scale=scale,
            saturated_pct=saturated,
            underflow_pct=underflow,
            nonfinite=nonfinite.astype(np.int64),
            sqnr_db=sqnr_db,
            calibrated=np.isnan(calibrated),
        )

    def to_json(self) -> dict[str, Row]:
        """Strict JSON, a row a tensor."""
        measured = np.stack(
            (self.amax, self.scale, self.saturated_pct, self.underflow_pct, self.nonfinite), axis=1
        )
        rows: list[Row] = measured.tolist()
        for i in np.flatnonzero(~np.isfinite(measured).all(axis=1)).tolist():
            rows[i] = [encode_float(value) for value in measured[i].tolist()]
        for i in np.flatnonzero(~np.isnan(self.sqnr_db) | ~self.calibrated).tolist():
            rows[i].append(encode_float(float(self.sqnr_db[i])))
            if not self.calibrated[i]:
                rows[i].append(0.0)
        return dict(zip(self.names, rows, strict=True))

    def __getitem__(self, name: str) -> TensorStats:
        if self._index is None:
            self._index = {name: i for i, name in enumerate(self.names)}
        i = self._index[name]
        sqnr_db = float(self.sqnr_db[i])
        return TensorStats(
            float(self.amax[i]),
            float(self.scale[i]),
            float(self.saturated_pct[i]),
            float(self.underflow_pct[i]),
            int(self.nonfinite[i]),
            None if math.isnan(sqnr_db) else sqnr_db,
            bool(self.calibrated[i]),
        )

    def __iter__(self) -> Iterator[str]:
        return iter(self.names)

    def __len__(self) -> int:
        return len(self.names)

    def __repr__(self) -> str:
        return f"TensorColumns({dict(self)!r})"

    def __reduce__(self) -> tuple[Any, ...]:
        return (_columns, tuple(getattr(self, name) for name in self.__slots__[:-1]))


def _columns(names: tuple[str, ...], *arrays: Any) -> TensorColumns:
    return TensorColumns(names, **dict(zip(TensorColumns.__slots__[1:-1], arrays, strict=True)))


NO_TENSORS: Mapping[str, TensorStats] = TensorColumns.of({})
