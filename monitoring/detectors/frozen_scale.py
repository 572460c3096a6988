"""Delayed scales that don't follow their tensors.

Sees: each tensor's scale against the amaxs of the records before. After an update that saw the
amax a, every rule of delayed scaling (max, most_recent, ema) makes a scale of at most
fp8_max / a / 2^margin. Statistic, for a scale that hasn't changed at all: how many amaxs above
what it allows for it has not followed (*frozen*); and whether all amaxs of two histories, which
is as long as an old one can count, call for a scale of twice it or more (*stale*). Fires at
``frozen_scale_steps`` of the first, or at the second; then not again for a ``window``, unless the
scale moves meanwhile.

Must not fire on: recipes whose scales have no history; a long history that an old outlier holds
down; a constant amax; steps whose update was left out, which update no scale; statistics of
every n-th step, whose amax is of more steps than the next scale has seen (there an octave counts
and no less); layers in BF16 and after their return.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from monitoring.amax import format_maxima
from monitoring.detectors.base import Detector, register
from monitoring.detectors.tensors import Bools, Floats, TensorRows, or_zero, suspects, table_of
from monitoring.records import Incident, StepRecord

LEAST_OCTAVES = 0.05
"""Octaves above what a scale allows for, from which an amax asks for another: 3.5 %."""
LEAST_OCTAVES_SAMPLED = 1.0
"""The same where records are further apart than one step."""
STALE_OCTAVES = 1.0
"""Octaves of headroom that a scale of two histories ago must have left to be stale."""

FIELDS = ("scale", "octaves", "unheeded", "since", "changed", "largest", "before", "told")
"""Of the record before: log2 of scale and amax. Then: amaxs that were not followed since the
scale changed, and the step of the first; when it changed; the largest log2(amax) of this stretch
of a history's steps and of the one before; the step at which it was told."""


@dataclass(frozen=True, slots=True)
class ScaleState:
    """Rows a tensor, and the newest record's step."""

    rows: TensorRows
    step: int | None = None


@register
class FrozenScale(Detector[ScaleState]):
    """Fires when a delayed scale stands still while its tensor moves."""

    name = "frozen_scale"
    of_facts = True

    def initial(self) -> ScaleState:
        return ScaleState(TensorRows.nothing(len(FIELDS)))

    def dump(self, state: ScaleState) -> Any:
        return {"rows": state.rows.dump(), "step": state.step}

    def load(self, row: Any) -> ScaleState:
        step = None if row["step"] is None else int(row["step"])
        return ScaleState(TensorRows.load(row["rows"], len(FIELDS)), step)

    def counts_while_settling(self, incident: Incident) -> bool:
        # The rule of scaling holds at any time; there is no baseline that would have to settle.
        return True

    def observe(self, state: ScaleState, record: StepRecord) -> tuple[ScaleState, list[Incident]]:
        if not record.tensors or record.skipped or not self.scaling.has_history:
            return state, []
        table, history = table_of(record), self.scaling.history
        rows = state.rows.named(table.names)
        last, seen, unheeded, since, changed, largest, before, told = rows.fields()
        unheeded = or_zero(unheeded)
        scale = np.full(len(table.names), np.nan)
        np.log2(table.scale, out=scale, where=np.isfinite(table.scale) & (table.scale > 0.0))
        # As they are kept: a scale is the same when its float32 is.
        scale = scale.astype(np.float32).astype(np.float64)
        running = ~table.in_bf16 & table.calibrated

        full = np.log2(format_maxima(table.names, self.scaling.fp8_format)) - self.scaling.margin
        next_step = state.step is not None and record.step == state.step + 1
        least = LEAST_OCTAVES if next_step else LEAST_OCTAVES_SAMPLED
        still = running & (scale == last)
        missed = still & (seen + scale - full >= least)
        unheeded = np.where(still, unheeded + missed, 0)
        since = np.where(still, np.where(missed & np.isnan(since), record.step, since), np.nan)
        changed = np.where(still, changed, record.step)
        stretches = record.step // history - (state.step or 0) // history
        if stretches:
            before = largest if stretches == 1 else np.full(len(scale), np.nan)
            largest = np.full(len(scale), np.nan)
        largest = np.fmax(largest, np.where(running, table.octaves, np.nan))
        told = np.where(still & (record.step - told < self.config.window), told, np.nan)

        frozen = unheeded >= self.config.frozen_scale_steps
        unused = full - scale - np.fmax(largest, before)
        stale = still & (record.step - changed > 2 * history) & (unused >= STALE_OCTAVES)
        hits = (frozen | stale) & np.isnan(told)
        values = (
            np.where(running, scale, np.nan),
            np.where(running, table.octaves, np.nan),
            unheeded,
            since,
            changed,
            largest,
            before,
            np.where(hits, record.step, told),
        )
        following = ScaleState(TensorRows.of(table.names, values), record.step)
        if not hits.any():
            return following, []
        return following, [
            self._incident(record, hits, frozen, since, changed, seen + scale - full)
        ]

    def _incident(
        self,
        record: StepRecord,
        hits: Bools,
        frozen: Bools,
        since: Floats,
        changed: Floats,
        over: Floats,
    ) -> Incident:
        table = table_of(record)
        begin = np.where(frozen, since, changed)
        evidence = {"scale": table.scale, "amax": table.amax, "octaves_over": over}
        found = suspects(table.names, hits, begin, np.abs(over), evidence)
        worst = int(np.argmax(np.where(hits, np.abs(or_zero(over)), -np.inf)))
        what = (
            f"has not followed {self.config.frozen_scale_steps} amaxs that it is too large for"
            if frozen[worst]
            else f"leaves {-over[worst]:.1f} octaves unused that no amax of two histories "
            f"({2 * self.scaling.history} steps) called for"
        )
        return self.incident(
            record,
            # Numbers were scaled wrongly from here on; while a stale scale only wastes range.
            onset_step=int(np.nanmin(since[hits])) if frozen[hits].any() else record.step,
            message=(
                f"The delayed scale of {table.names[worst]}, {table.scale[worst]:.4g}, {what} "
                f"(since step {begin[worst]:.0f}; amax {table.amax[worst]:.3g} in step "
                f"{record.step})."
            ),
            evidence={
                "octaves_over": float(over[worst]),
                "frozen": float(np.count_nonzero(hits & frozen)),
                "stale": float(np.count_nonzero(hits & ~frozen)),
            },
            suspects=found,
        )
