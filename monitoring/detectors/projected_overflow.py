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
from typing import Any

import numpy as np

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

LEVEL, COUNT, RING = 0, 1, 2
"""Rows of the state: average octaves; records seen, up to ``window``; then the newest octaves,
oldest first."""
FIELDS = RING + TREND_RECORDS


@register
class ProjectedOverflow(Detector[tuple[TensorRows, tuple[int, ...]]]):
    """Fires when a tensor's growth will take it out of FP8's range soon."""

    name = "projected_overflow"

    def initial(self) -> tuple[TensorRows, tuple[int, ...]]:
        return TensorRows.nothing(FIELDS), ()

    def dump(self, state: tuple[TensorRows, tuple[int, ...]]) -> Any:
        rows, steps = state
        usual = TensorRows(rows.names, rows.values[:RING])
        # Most of all that detectors keep is in the ring: two bytes a value do.
        grains = np.nan_to_num(rows.values[RING:] * GRAINS, nan=MISSING).astype("<i2")
        ring = base64.b64encode(zlib.compress(grains.tobytes(), 1)).decode()
        return {"rows": usual.dump(), "ring": ring, "steps": list(steps)}

    def load(self, row: Any) -> tuple[TensorRows, tuple[int, ...]]:
        usual = TensorRows.load(row["rows"], RING)
        stored = np.frombuffer(zlib.decompress(base64.b64decode(row["ring"])), dtype="<i2")
        grains = stored.reshape(TREND_RECORDS, len(usual.names)).astype(np.float32)
        ring = np.where(grains == MISSING, np.float32(np.nan), grains / GRAINS)
        rows = TensorRows(usual.names, np.vstack((usual.values, ring.astype(np.float32))))
        return rows, tuple(int(step) for step in row["steps"])

    def observe(
        self, state: tuple[TensorRows, tuple[int, ...]], record: StepRecord
    ) -> tuple[tuple[TensorRows, tuple[int, ...]], list[Incident]]:
        if not record.tensors or record.skipped or not self.scaling.is_per_tensor:
            return state, []
        config, table = self.config, table_of(record)
        rows, steps = state
        old = rows.named(table.names).values
        steps = (*steps, record.step)[-TREND_RECORDS:]
        values = np.empty((FIELDS, len(table.names)), dtype=np.float32)
        values[RING:-1] = old[RING + 1 :]
        values[-1] = np.round(np.clip(table.octaves, -127.0, 127.0) * GRAINS) / GRAINS
        ring = values[RING:]
        running = ~table.in_bf16

        slope, explained = _line(steps, ring)
        rise = slope * (steps[-1] - steps[0])
        level, count = old[LEVEL].astype(np.float64), or_zero(old[COUNT].astype(np.float64))
        growing = (explained >= LEAST_EXPLAINED) & (rise >= GROWING_OCTAVES)
        share = np.maximum(1.0 / (count + 1.0), 2.0 / (config.window + 1.0))
        usual = ~np.isnan(table.octaves) & ~(growing & (count >= config.window))
        fresh = np.where(np.isnan(level), table.octaves, level + share * (table.octaves - level))
        values[LEVEL] = np.where(usual, fresh, level)
        values[COUNT] = np.where(usual, np.minimum(count + 1, config.window), count)

        risen = np.fmax(table.octaves - level, 0.0)
        hits = growing & running & (count >= config.window) & ~table.backward
        hits &= (rise >= config.overflow_rise) & (risen >= config.overflow_rise)
        left = np.full(len(hits), np.inf)
        np.divide(np.fmax(config.overflow_octaves - risen, 0.0), slope, out=left, where=hits)
        hits &= left <= config.overflow_horizon
        new = (TensorRows(table.names, values), steps)
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


def _line(steps: tuple[int, ...], ring: Floats) -> tuple[Floats, Floats]:
    """Slope in octaves a step, and share of the variance explained, of each column of ``ring``.

    Both 0 while there are fewer records than ``TREND_RECORDS``, where a value is missing, and
    where the ends are too near each other for growth.
    """
    slope, explained = np.zeros(ring.shape[1]), np.zeros(ring.shape[1])
    if len(steps) < TREND_RECORDS:
        return slope, explained
    # Few columns pass, and the line of the others needn't be drawn.
    where = np.flatnonzero(ring[-1] - ring[0] >= LEAST_BETWEEN_ENDS)
    x = np.asarray(steps, dtype=np.float64)
    x -= x.mean()
    y = ring[:, where].astype(np.float64)
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
