"""The layers of a job through its steps: colours of the heat map, and the same in words. Pure.

What is coloured is trouble, and what comes before it: values that were clamped, else an amax above
what it usually is. The room below the format's maximum would say nothing: a scale that is made from
amax leaves next to none in every healthy step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from monitoring.amax import are_of_layers, split_name
from monitoring.amax_trend import UsualAmax, octaves
from monitoring.records import StepRecord
from monitoring.tensor_stats import TensorColumns

CLAMPED_PCT = (10.0, 1.0, 0.1)
"""Percent of values clamped from which the first colours are taken."""
RISE_OCTAVES = (2.0, 1.0, 0.5)
"""Octaves that amax is above its usual from which the next colours are taken."""
COLOURS = (
    "10 % clamped and more",
    "1 % and more",
    "0.1 % and more",
    "amax 2 octaves above its usual and more",
    "1 to 2 octaves",
    "0.5 to 1 octave",
    "as usual",
)
"""What the colours 0 to 6 mean."""
BF16, NO_CELL = len(COLOURS), len(COLOURS) + 1
"""After the colours: a layer that computed in BF16, and one of which nothing is known."""


@dataclass(slots=True)
class LayerFacts:
    """What was worst of a layer, over all its operands and steps."""

    clamped_pct: float = 0.0
    clamped_step: int | None = None
    """None: nothing was clamped."""
    rise: float = 0.0
    """Octaves above the usual amax."""
    rise_step: int | None = None

    def add(self, step: int, clamped_pct: float, rise: float) -> None:
        """Take in a step in which the layer computed in FP8."""
        if clamped_pct > self.clamped_pct:
            self.clamped_pct, self.clamped_step = clamped_pct, step
        if rise > self.rise:
            self.rise, self.rise_step = rise, step

    @property
    def clamped_text(self) -> str:
        if self.clamped_step is None:
            return "none"
        return f"{self.clamped_pct:.2g} % in step {self.clamped_step:,}"

    @property
    def rise_text(self) -> str:
        if self.rise_step is None:
            return "–"
        return f"{octaves(self.rise)} octaves in step {self.rise_step:,}"


@dataclass(frozen=True, slots=True)
class LayersSeen:
    """The layers in one step, an array a fact [layers]; of a layer the worst of its operands."""

    layers: tuple[str, ...]
    colours: npt.NDArray[np.uint8]
    """0 the worst to 6, BF16, or NO_CELL where no operand is calibrated yet."""
    clamped: npt.NDArray[np.float64]
    """Percent; 0 where nothing counts."""
    rise: npt.NDArray[np.float64]
    """Octaves above the usual amax; 0 where nothing counts."""


def look_at(record: StepRecord, usual: UsualAmax) -> LayersSeen | None:
    """What a step says of its layers; None where it has no statistics. ``usual``: of the steps
    before, one of which it then is."""
    columns = TensorColumns.of(record.tensors)
    if not columns.names:
        return None
    names, where = _layers_of(columns.names)
    away = are_of_layers(columns.names, tuple(record.high_precision_layers))
    counted = columns.calibrated & ~away
    rises = usual.rise(columns, counted)
    colours = np.full(len(names), NO_CELL, dtype=np.uint8)
    colours[where[away]] = BF16
    np.minimum.at(colours, where[counted], colours_of(columns.saturated_pct, rises)[counted])
    clamped = np.zeros(len(names))
    np.maximum.at(clamped, where[counted], columns.saturated_pct[counted])
    most = np.zeros(len(names))
    np.maximum.at(most, where[counted], rises[counted])
    return LayersSeen(names, colours, clamped, most)


class Layers:
    """Colours and facts of every layer, in the layers' own order."""

    def __init__(self) -> None:
        self._usual = UsualAmax()
        self.cells: dict[str, dict[int, int]] = {}
        """Layer → step → colour of its worst operand, 0 the worst to 6; none while in BF16."""
        self.facts: dict[str, LayerFacts] = {}

    @classmethod
    def of(cls, kept: Sequence[StepRecord], abandoned: Sequence[StepRecord]) -> Layers:
        """Of abandoned steps only trouble is shown, for the kept ones stand in the same place."""
        layers = cls()
        for record in kept:
            layers.add(record, most=BF16 - 1)
        for record in abandoned:
            layers.add(record, most=len(CLAMPED_PCT) - 1)
        return layers

    def add(self, record: StepRecord, most: int) -> None:
        """Take in a step; colours up to ``most`` are shown."""
        seen = look_at(record, self._usual)
        if seen is None:
            return
        for i, name in enumerate(seen.layers):
            row = self.cells.setdefault(name, {})
            colour = int(seen.colours[i])
            if colour <= most:
                row[record.step] = min(colour, row.get(record.step, colour))
            facts = self.facts.setdefault(name, LayerFacts())
            facts.add(record.step, float(seen.clamped[i]), float(seen.rise[i]))

    def worst(self, count: int) -> list[str]:
        """The ``count`` layers with the most trouble, in their own order."""

        def badness(name: str) -> list[int]:
            colours = list(self.cells[name].values())
            return [-colours.count(c) for c in range(len(COLOURS) - 1)]

        shown = set(sorted(self.cells, key=badness)[:count])
        return [name for name in self.cells if name in shown]


def colours_of(
    clamped_pct: npt.NDArray[np.float64], rise: npt.NDArray[np.float64]
) -> npt.NDArray[np.uint8]:
    """Colour of each tensor in one step, 0 the worst to 6.

    Clamped values decide; where there are next to none, how far amax rose above its usual.
    """
    colours = np.full(rise.shape, len(COLOURS) - 1)
    for colour, limit in reversed(list(enumerate(RISE_OCTAVES, len(CLAMPED_PCT)))):
        colours = np.where(rise >= limit, colour, colours)
    for colour, limit in reversed(list(enumerate(CLAMPED_PCT))):
        colours = np.where(clamped_pct >= limit, colour, colours)
    return colours.astype(np.uint8)


@lru_cache(maxsize=8)
def _layers_of(names: tuple[str, ...]) -> tuple[tuple[str, ...], npt.NDArray[np.int64]]:
    """All layers once, and the place among them of each tensor's."""
    index: dict[str, int] = {}
    for name in names:
        index.setdefault(split_name(name)[0], len(index))
    return tuple(index), np.array([index[split_name(name)[0]] for name in names], dtype=np.int64)
