"""Tensors that grow steadily towards where a scale of their own fails them.

Sees: log2(amax) of inputs and weights under recipes with one scale a tensor. Statistic: the
straight line through the newest ``TREND_RECORDS`` values (least squares), the share of their
spread that it explains, and the steps until it reaches ``overflow_octaves`` above the tensor's
history, a slow average that steady growth doesn't enter. Fires when the line explains
``LEAST_EXPLAINED``, the tensor has risen by ``overflow_rise`` and fewer than
``overflow_horizon`` steps are left: before the loss moves, so that the layer can leave FP8 with
nothing lost. A scale that follows its amax saturates next to nothing on that way; what is lost
is the rest of the tensor, pushed into subnormals and zero by one outlier (arXiv 2409.12517).

Must not fire on: a jump to another level (a line explains three quarters of it at most); the
growth of warm-up (silent until ``window`` records of a tensor were seen); drift over hundreds
of steps; noise; gradients; layers in BF16; scales by block, where an outlier costs its block.
"""

from __future__ import annotations

import base64
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from monitoring.detectors.base import Detector, register
from monitoring.detectors.tensors import (
    Bools,
    Floats,
    TensorRows,
    or_zero,
    suspects,
    table_of,
)
from monitoring.records import Incident, StepRecord

TREND_RECORDS = 16
"""Values that a line is drawn through."""
LEAST_EXPLAINED = 0.9
"""Share of the values' variance about their mean that the line must explain; of a jump in the
middle it explains 0.75, of noise next to nothing."""
GROWING_OCTAVES = 0.5
"""Rise along the line from which values are growth, and stay out of the history."""
LEAST_BETWEEN_ENDS = 0.25
"""Octaves between the oldest and the newest value, below which there is no such growth."""
GRAINS = 256
"""Steps of an octave in which the values of a line are kept."""
MISSING = -32768
"""Stands for a value that there isn't."""

FIELDS = ("level", "count")
"""Average octaves; records seen, up to ``window``."""


@dataclass(frozen=True, slots=True)
class GrowthState:
    """Of each tensor what is usual, and the newest records' values."""

    usual: TensorRows
    steps: tuple[int, ...] = ()
    """Of the newest records, oldest first; ``TREND_RECORDS`` at most."""
    values: tuple[npt.NDArray[np.float32], ...] = ()
    """log2(amax) in each of them [tensors], in the order of ``usual.names``, in whole grains. A
    state shares all but the newest with the one before it."""

    def named(self, names: tuple[str, ...]) -> GrowthState:
        """For another set of tensors, as ``TensorRows.named``."""
        if names is self.usual.names or names == self.usual.names:
            return self
        usual = self.usual.named(names)
        rows = np.empty((0, len(self.usual.names)), dtype=np.float32)
        past = TensorRows(self.usual.names, np.vstack((rows, *self.values))).named(names)
        return GrowthState(usual, self.steps, tuple(past.values))


@register
class ProjectedOverflow(Detector[GrowthState]):
    """Fires when a tensor's growth will take it out of FP8's range soon."""

    name = "projected_overflow"

    def initial(self) -> GrowthState:
        return GrowthState(TensorRows.nothing(len(FIELDS)))

    def dump(self, state: GrowthState) -> Any:
        # Most of all that detectors keep is in the values: two bytes each do.
        kept = np.array(state.values, dtype=np.float32)
        grains = np.nan_to_num(kept * GRAINS, nan=MISSING).astype("<i2")
        packed = base64.b64encode(zlib.compress(grains.tobytes(), 1)).decode()
        return {"rows": state.usual.dump(), "ring": packed, "steps": list(state.steps)}

    def load(self, row: Any) -> GrowthState:
        usual = TensorRows.load(row["rows"], len(FIELDS))
        stored = np.frombuffer(zlib.decompress(base64.b64decode(row["ring"])), dtype="<i2")
        steps = tuple(int(step) for step in row["steps"])
        grains = stored.reshape(-1, len(usual.names))[-len(steps) :] if steps else stored[:0]
        if len(grains) != len(steps):
            raise ValueError(f"values of {len(grains)} records are stored for {len(steps)} steps")
        kept = np.where(grains == MISSING, np.nan, grains / GRAINS).astype(np.float32)
        return GrowthState(usual, steps, tuple(kept))

    def observe(self, state: GrowthState, record: StepRecord) -> tuple[GrowthState, list[Incident]]:
        if not record.tensors or record.skipped or not self.scaling.is_per_tensor:
            return state, []
        config, table = self.config, table_of(record)
        state = state.named(table.names)
        level, count = state.usual.fields()
        count = or_zero(count)
        newest = np.round(np.clip(table.octaves, -127.0, 127.0) * GRAINS) / GRAINS
        steps = (*state.steps, record.step)[-TREND_RECORDS:]
        values = (*state.values, newest.astype(np.float32))[-TREND_RECORDS:]
        running = ~table.in_bf16

        slope, explained = _line(steps, values, ~table.backward)
        rise = slope * (steps[-1] - steps[0])
        growing = (explained >= LEAST_EXPLAINED) & (rise >= GROWING_OCTAVES)
        share = np.maximum(1.0 / (count + 1.0), 2.0 / (config.window + 1.0))
        usual = ~np.isnan(table.octaves) & ~(growing & (count >= config.window))
        fresh = np.where(np.isnan(level), table.octaves, level + share * (table.octaves - level))
        rows = (
            np.where(usual, fresh, level),
            np.where(usual, np.minimum(count + 1, config.window), count),
        )

        risen = np.fmax(table.octaves - level, 0.0)
        hits = growing & running & (count >= config.window)
        hits &= (rise >= config.overflow_rise) & (risen >= config.overflow_rise)
        left = np.full(len(hits), np.inf)
        np.divide(np.fmax(config.overflow_octaves - risen, 0.0), slope, out=left, where=hits)
        hits &= left <= config.overflow_horizon
        new = GrowthState(TensorRows.of(table.names, rows), steps, values)
        if not hits.any():
            return new, []
        return new, [self._incident(record, steps, hits, growing, slope, rise, risen, left)]

    def _incident(
        self,
        record: StepRecord,
        steps: tuple[int, ...],
        hits: Bools,
        growing: Bools,
        slope: Floats,
        rise: Floats,
        risen: Floats,
        left: Floats,
    ) -> Incident:
        table = table_of(record)
        # Where the line met the level: with the same growth, who has risen most began first.
        began = np.full(len(hits), np.nan)
        np.divide(risen, slope, out=began, where=growing)
        began = np.clip(record.step - np.ceil(began) + 1, steps[0], record.step)
        evidence = {
            "amax": table.amax,
            "octaves_a_step": slope,
            "risen_octaves": risen,
            "steps_left": left,
            "usual_amax": np.exp2(table.octaves - risen),
        }
        # Who grows with it, though not as fast: the weights behind an input, say.
        involved = hits | (growing & (rise >= self.config.overflow_rise / 2))
        found = suspects(table.names, involved, began, risen, evidence)
        worst = int(np.argmin(np.where(hits, left, np.inf)))
        return self.incident(
            record,
            onset_step=int(np.nanmin(began[hits])),
            message=(
                f"{table.names[worst]} grows by {slope[worst]:.2f} octaves a step, "
                f"{risen[worst]:.1f} so far in step {record.step}: in {left[worst]:.0f} steps it "
                f"will be {self.config.overflow_octaves:g} octaves above its history, more than "
                f"its FP8 scale can cover (limit {self.config.overflow_horizon} steps); first to "
                f"move was {found[0].layer}."
            ),
            evidence={
                "steps_left": float(left[worst]),
                "octaves_a_step": float(slope[worst]),
                "risen_octaves": float(risen[worst]),
                "growing_tensors": float(np.count_nonzero(hits)),
            },
            suspects=found,
        )


def _line(steps: Sequence[int], values: Sequence[Floats], forward: Bools) -> tuple[Floats, Floats]:
    """Slope in octaves a step, and share of the variance explained, of each tensor's ``values``.

    Both 0 while there are fewer records than ``TREND_RECORDS``, of gradients, where a value is
    missing, and where the ends are too near each other for growth.
    """
    slope, explained = np.zeros(len(values[-1])), np.zeros(len(values[-1]))
    if len(steps) < TREND_RECORDS:
        return slope, explained
    # Few tensors pass, and the line of the others needn't be drawn.
    where = np.flatnonzero((values[-1] - values[0] >= LEAST_BETWEEN_ENDS) & forward)
    x = np.asarray(steps, dtype=np.float64)
    x -= x.mean()
    y = np.array([row.take(where) for row in values], dtype=np.float64)
    y -= y.mean(axis=0)
    square = float(x @ x)
    slopes = (x @ y) / square
    total = np.einsum("ij,ij->j", y, y)
    # A column with a missing value is NaN throughout, and explains nothing.
    complete = total > 0.0
    slope[where] = np.where(complete, slopes, 0.0)
    explained[where] = np.divide(
        slopes * slopes * square, total, out=np.zeros(len(where)), where=complete
    )
    return slope, explained
