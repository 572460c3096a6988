"""Per-tensor FP8 statistics: how ranks pack them, and how much room is left.

A rank sends one float32 array [tensors, 9] a step, rows named ``"{layer}/{role}"`` and
columns as in ``COLUMNS``; this module is the only place that knows that layout outside
the rank. Scale is the multiplier before the cast (fp8 value = x * scale), as everywhere.

Promises: pure, numpy only. ``monitoring.tensor_sums`` puts the ranks' together.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from monitoring.tensor_stats import TensorColumns, TensorStats

COLUMNS = (
    *("amax", "scale", "saturated", "underflowed", "nonfinite", "count"),
    *("signal", "noise", "uncalibrated"),
)
"""Largest magnitude; multiplier (of several blocks, the one of that magnitude); values clamped,
values lost to zero (-0 too), non-finite values, values; and, where the spec asks for SQNR, the
energies of the values and of what quantization took from them; last, 1 where some step was cast
without a scale made from data (a delayed scale before its first update is 1), else 0. NaN is not
measured."""

FORMAT_MAX: Mapping[str, Mapping[str, float]] = {
    "HYBRID": {"input": 448.0, "weight": 448.0, "grad_output": 57344.0},
    "E4M3": {"input": 448.0, "weight": 448.0, "grad_output": 448.0},
}
"""Largest finite value of an operand's FP8 format, by the recipe's ``format`` and the role."""


@dataclass(frozen=True, slots=True)
class TensorScaling:
    """What one must know of a job's FP8 recipe to judge its scales; as in its ``fp8`` section."""

    recipe: str = "delayed"
    fp8_format: str = "HYBRID"
    margin: int = 0
    """Octaves that delayed scales leave free."""
    history: int = 1024
    """Updates that an amax counts for in a delayed scale."""

    @property
    def has_history(self) -> bool:
        """Whether scales are made from earlier steps' amax."""
        return self.recipe == "delayed"

    @property
    def is_per_tensor(self) -> bool:
        """Whether one value sets the scale of its whole tensor; in blocks it sets a block's."""
        return self.recipe in ("delayed", "current")


def encode(stats: npt.NDArray[np.float32]) -> bytes:
    """The bytes of ``RankReport.stats``: float32 [tensors, 9], row after row, little-endian."""
    return np.ascontiguousarray(stats, dtype="<f4").tobytes()


def decode(stats: bytes, names: Sequence[str]) -> npt.NDArray[np.float32]:
    """float32 [tensors, 9] of one rank; ValueError when the bytes don't fit the names."""
    check_size(stats, names)
    return np.frombuffer(stats, dtype="<f4").reshape(len(names), len(COLUMNS))


def check_size(stats: bytes, names: Sequence[str]) -> None:
    """Raises ValueError when the bytes don't fit the names."""
    wanted = len(names) * len(COLUMNS) * 4
    if len(stats) != wanted:
        raise ValueError(
            f"{len(stats)} bytes of statistics for {len(names)} tensors; "
            f"float32 [{len(names)}, {len(COLUMNS)}] has {wanted}"
        )


def split_name(name: str) -> tuple[str, str]:
    """(layer, role) of ``"layers.3.mlp.down/input"``."""
    layer, _, role = name.rpartition("/")
    return layer, role


def headroom_octaves(name: str, stats: TensorStats, fp8_format: str = "HYBRID") -> float:
    """How often the tensor's amax can double before it is clamped; below 0 it is clamped now.

    log2(format maximum / (amax * scale)); infinite for an all-zero tensor, minus infinite
    for a non-finite amax.
    """
    limits = FORMAT_MAX.get(fp8_format, FORMAT_MAX["HYBRID"])
    limit = limits.get(split_name(name)[1], 448.0)
    largest = stats.amax * stats.scale
    if math.isnan(largest) or math.isinf(largest):
        return -math.inf
    if largest <= 0.0:
        return math.inf
    return math.log2(limit / largest)


def headrooms(tensors: TensorColumns, fp8_format: str = "HYBRID") -> npt.NDArray[np.float64]:
    """``headroom_octaves`` of every tensor, in their order."""
    with np.errstate(all="ignore"):
        largest = tensors.amax * tensors.scale
        octaves = np.log2(format_maxima(tensors.names, fp8_format) / largest)
    rooms = np.where(largest <= 0.0, np.inf, -np.inf)
    return np.where((largest > 0.0) & np.isfinite(largest), octaves, rooms)


@lru_cache(maxsize=8)
def format_maxima(names: tuple[str, ...], fp8_format: str) -> npt.NDArray[np.float64]:
    """Each tensor's largest finite FP8 value."""
    limits = FORMAT_MAX.get(fp8_format, FORMAT_MAX["HYBRID"])
    return np.array([limits.get(split_name(name)[1], 448.0) for name in names])


@lru_cache(maxsize=8)
def are_of_layers(names: tuple[str, ...], layers: tuple[str, ...]) -> npt.NDArray[np.bool_]:
    """Which tensors are of one of ``layers``."""
    wanted = frozenset(layers)
    return np.array([split_name(name)[0] in wanted for name in names], dtype=np.bool_)


def worst_by_headroom(
    tensors: Mapping[str, TensorStats],
    count: int,
    fp8_format: str = "HYBRID",
    without_layers: Iterable[str] = (),
) -> list[tuple[str, float]]:
    """The ``count`` tensors nearest to (or furthest beyond) their format's maximum, worst first.

    (name, headroom in octaves). Layers in ``without_layers`` (those in BF16) and tensors
    that are not calibrated yet are left out: their headroom means nothing.
    """
    columns = TensorColumns.of(tensors)
    counted = columns.calibrated & ~are_of_layers(columns.names, tuple(without_layers))
    where = np.flatnonzero(counted)
    rooms = headrooms(columns, fp8_format)[where]
    if len(where) > count > 0:
        # Names decide among equals, so all that are as bad as the last one stay.
        kept = rooms <= np.partition(rooms, count - 1)[count - 1]
        where, rooms = where[kept], rooms[kept]
    rated = (
        (room, columns.names[i]) for i, room in zip(where.tolist(), rooms.tolist(), strict=True)
    )
    return [(name, room) for room, name in heapq.nsmallest(count, rated)]
