"""The layers of a job through its steps: colours of the heat map, and the same in words. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from monitoring.amax import are_of_layers, headrooms, split_name
from monitoring.records import StepRecord
from monitoring.tensor_stats import TensorColumns

CLAMPED_PCT = (10.0, 1.0, 0.1)
"""Percent of values clamped from which the first colours are taken."""
HEADROOM_OCTAVES = (1.0, 2.0, 3.0)
"""Headroom that parts the other colours."""
_NONE = len(CLAMPED_PCT) + len(HEADROOM_OCTAVES) + 1


@dataclass(slots=True)
class LayerFacts:
    """What was worst of a layer, over all its operands and steps."""

    clamped_pct: float = 0.0
    clamped_step: int | None = None
    """None: nothing was clamped."""
    headroom: float = math.inf
    """Octaves."""
    headroom_step: int | None = None


class Layers:
    """Colours and facts of every layer, in the layers' own order."""

    def __init__(self, fp8_format: str) -> None:
        self._format = fp8_format
        self.cells: dict[str, dict[int, int]] = {}
        """Layer → step → colour of its worst operand, 0 the worst to 6; none while in BF16."""
        self.facts: dict[str, LayerFacts] = {}

    @classmethod
    def of(
        cls, kept: Sequence[StepRecord], abandoned: Sequence[StepRecord], fp8_format: str
    ) -> Layers:
        """Of abandoned steps only trouble is shown, for the kept ones stand in the same place."""
        layers = cls(fp8_format)
        for record in kept:
            layers.add(record, most=_NONE)
        for record in abandoned:
            layers.add(record, most=len(CLAMPED_PCT) - 1)
        return layers

    def add(self, record: StepRecord, most: int) -> None:
        """Take in a step; colours up to ``most`` are shown."""
        columns = TensorColumns.of(record.tensors)
        if not columns.names:
            return
        names, where = _layers_of(columns.names)
        for name in names:
            self.cells.setdefault(name, {})
            self.facts.setdefault(name, LayerFacts())
        counted = columns.calibrated & ~are_of_layers(
            columns.names, tuple(record.high_precision_layers)
        )
        if not counted.any():
            return
        rooms = headrooms(columns, self._format)
        colours = colours_of(columns.saturated_pct, rooms)
        worst = np.full(len(names), _NONE, dtype=np.int64)
        np.minimum.at(worst, where[counted], colours[counted])
        clamped = np.zeros(len(names))
        np.maximum.at(clamped, where[counted], columns.saturated_pct[counted])
        least = np.full(len(names), np.inf)
        np.minimum.at(least, where[counted], rooms[counted])
        for i, colour in enumerate(worst.tolist()):
            if colour <= most and colour < _NONE:
                row = self.cells[names[i]]
                row[record.step] = min(colour, row.get(record.step, colour))
            facts = self.facts[names[i]]
            if clamped[i] > facts.clamped_pct:
                facts.clamped_pct, facts.clamped_step = float(clamped[i]), record.step
            if least[i] < facts.headroom:
                facts.headroom, facts.headroom_step = float(least[i]), record.step

    def worst(self, count: int) -> list[str]:
        """The ``count`` layers with the most trouble, in their own order."""

        def badness(name: str) -> list[int]:
            colours = list(self.cells[name].values())
            return [-colours.count(c) for c in range(len(CLAMPED_PCT) + 1)]

        shown = set(sorted(self.cells, key=badness)[:count])
        return [name for name in self.cells if name in shown]


def colours_of(
    clamped_pct: npt.NDArray[np.float64], headroom: npt.NDArray[np.float64]
) -> npt.NDArray[np.int64]:
    """Colour of each tensor in one step, 0 the worst to 6.

    Clamped values decide; headroom only where there are next to none. Delayed scaling leaves
    a steady tensor no headroom by intent, so that little of it is no trouble by itself.
    """
    colours = len(CLAMPED_PCT) + np.searchsorted(HEADROOM_OCTAVES, headroom, side="right")
    for colour, limit in reversed(list(enumerate(CLAMPED_PCT))):
        colours = np.where(clamped_pct >= limit, colour, colours)
    return colours.astype(np.int64)


@lru_cache(maxsize=8)
def _layers_of(names: tuple[str, ...]) -> tuple[tuple[str, ...], npt.NDArray[np.int64]]:
    """All layers once, and the place among them of each tensor's."""
    index: dict[str, int] = {}
    for name in names:
        index.setdefault(split_name(name)[0], len(index))
    return tuple(index), np.array([index[split_name(name)[0]] for name in names], dtype=np.int64)
