"""Tensors that outgrew their FP8 scale.

Sees: each tensor's share of clamped values, and its amax against its own history.
Statistic: percent saturated for ``saturation_patience`` steps in a row at or above
``saturation_pct``, or ``SUDDEN`` times that in one; beside it the *surge*, the octaves by
which log2(amax) exceeds the largest of recent healthy steps (a maximum that leaks an octave a
``window``). Suspects are layers, the one that moved first in front; among equals a forward
operand (input, weight) before a gradient, which only follows it, then the larger surge. The onset
is the first step of the present stretch in which a saturated tensor was clamped notably or rose
steeply: steps that it stood still for at a new level before that are healthy.

Must not fire on: a tensor whose delayed scale has seen no data yet, a layer
that computes in BF16, a handful of clamped values above an old maximum. In a settling
window only heavy saturation counts (``HEAVY`` times the limit).

All tensors are handled at once as numpy arrays: a step of 1,000 tensors costs less than
a millisecond.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from monitoring.amax import split_name
from monitoring.detectors.base import Detector, register
from monitoring.detectors.tensors import (
    MOST_SUSPECTS,
    Bools,
    Floats,
    Ints,
    TensorRows,
    layers_of,
    table_of,
)
from monitoring.records import Incident, StepRecord, Suspect

SUDDEN = 4.0
"""Times the limit from which one step is enough. Healthy delayed scaling was seen to clamp 1.1 % of
a tensor once in ten thousand steps, in a single one."""
HEAVY = 10.0
"""Times the limit that saturation must reach to count within a settling window."""
MOVED_OCTAVES = 1.0
"""Surge from which a tensor is taken to have moved."""
STEEP_OCTAVES = 0.5
"""Rise since the record before from which a tensor that has moved is still moving."""
NOTABLE = 0.1
"""Share of the limit from which a tensor is clamped notably."""

FIELDS = 6
"""Of a stored state, a tensor."""
_NEVER = -1


@dataclass(frozen=True, slots=True)
class SaturationState:
    """One entry a tensor, in the order of ``names``; arrays are never written in place."""

    names: tuple[str, ...]
    reference: Floats
    """Leaky maximum of log2(amax) over healthy steps; NaN before the first."""
    calibrated: Bools
    """An earlier record showed a scale made from data."""
    run: Ints
    """Steps in a row at or above the limit."""
    moved_since: Ints
    """First step of the present stretch of moving or saturation, -1 for none."""
    before: Floats
    """log2(amax) of the record before; NaN where there is none."""
    worse_since: Ints
    """First step of the present stretch of being clamped notably or rising steeply, -1 for none."""


@register
class AmaxSaturation(Detector[SaturationState]):
    """Fires when a tensor is clamped more than a little, and names the layers to suspect."""

    name = "amax_saturation"

    def initial(self) -> SaturationState:
        return _empty(())

    def counts_while_settling(self, incident: Incident) -> bool:
        return incident.evidence["saturated_pct"] >= HEAVY * self.config.saturation_pct

    def observe(
        self, state: SaturationState, record: StepRecord
    ) -> tuple[SaturationState, list[Incident]]:
        if not record.tensors:
            return state, []
        table = table_of(record)
        names = table.names
        if names is not state.names and names != state.names:
            state = _renamed(state, names)
        amax, pct, calibrated = table.amax, table.saturated_pct, table.calibrated

        with np.errstate(divide="ignore", invalid="ignore"):
            octaves = np.log2(amax)
        surge = np.where(np.isnan(octaves), np.inf, octaves) - state.reference
        surge = np.where(np.isnan(surge), 0.0, surge)
        scaled = state.calibrated & calibrated & ~table.in_bf16
        clamped = scaled & (pct >= self.config.saturation_pct)
        moved = clamped | (surge >= MOVED_OCTAVES)
        worse = scaled & (pct >= NOTABLE * self.config.saturation_pct)
        with np.errstate(invalid="ignore"):
            worse |= moved & (octaves - state.before >= STEEP_OCTAVES)
        since = _since(moved, state.moved_since, record.step)
        run = np.where(clamped, state.run + 1, 0)
        following = SaturationState(
            names=names,
            reference=self._reference(state, octaves, moved, clamped, since, record.step),
            calibrated=state.calibrated | calibrated,
            run=run,
            moved_since=since,
            before=octaves.astype(np.float32).astype(np.float64),
            worse_since=_since(worse, state.worse_since, record.step),
        )
        sudden = clamped & (pct >= SUDDEN * self.config.saturation_pct)
        if not np.any(sudden | (run >= self.config.saturation_patience)):
            return following, []
        # Once one has lasted, all that are clamped are told: the cause may be a younger one.
        hits = np.flatnonzero(clamped)
        return following, [self._incident(record, following, hits, amax, pct, surge, moved)]

    def _reference(
        self,
        state: SaturationState,
        octaves: Floats,
        moved: Bools,
        clamped: Bools,
        since: Ints,
        step: int,
    ) -> Floats:
        """The next reference: moved tensors keep theirs, unless they stay where they went.

        One that moved a whole window ago without being clamped has found a new level; its
        old one would make it a suspect for ever.
        """
        first = np.isnan(state.reference)
        leaked = np.fmax(octaves, state.reference - 1.0 / self.config.window)
        settled = moved & ~clamped & (step - since >= self.config.window)
        fresh = np.where(first | settled, octaves, leaked)
        kept = np.where(moved & ~settled & ~first, state.reference, fresh)
        following = np.where(np.isfinite(kept), kept, state.reference)
        # As precise as it is stored.
        return following.astype(np.float32).astype(np.float64)

    def _incident(
        self,
        record: StepRecord,
        state: SaturationState,
        hits: Ints,
        amax: Floats,
        pct: Floats,
        surge: Floats,
        moved: Bools,
    ) -> Incident:
        involved = np.flatnonzero(moved)
        suspects = _suspects(state, involved, hits, amax, pct, surge)
        onset = int(state.worse_since[hits].min())
        worst = int(hits[np.argmax(pct[hits])])
        lead = suspects[0]
        return self.incident(
            record,
            onset_step=onset,
            message=(
                f"{len(hits)} of {len(state.names)} tensors saturated in step {record.step}: "
                f"{state.names[worst]} had {pct[worst]:.1f} % of its values clamped (limit "
                f"{self.config.saturation_pct:g} %); first to move was {lead.layer}, its "
                f"{lead.tensor} {lead.evidence['surge_octaves']:.1f} octaves above its history "
                f"since step {lead.evidence['since_step']:.0f}."
            ),
            evidence={
                "saturated_pct": float(pct[worst]),
                "saturated_tensors": float(len(hits)),
                "surge_octaves": float(surge[involved].max()),
            },
            suspects=suspects,
        )

    def dump(self, state: SaturationState) -> Any:
        since, worse = (
            np.where(steps == _NEVER, np.nan, steps)
            for steps in (state.moved_since, state.worse_since)
        )
        calibrated, run = state.calibrated.astype(float), state.run.astype(float)
        fields = (state.reference, calibrated, run, since, state.before, worse)
        return TensorRows.of(state.names, fields).dump()

    def load(self, row: Any) -> SaturationState:
        rows = TensorRows.load(row, FIELDS)
        reference, calibrated, run, since, before, worse = rows.fields()
        return SaturationState(
            names=rows.names,
            reference=reference,
            calibrated=calibrated > 0.0,
            run=run.astype(np.int64),
            moved_since=np.where(np.isnan(since), _NEVER, since).astype(np.int64),
            before=before,
            worse_since=np.where(np.isnan(worse), _NEVER, worse).astype(np.int64),
        )


def _since(flags: Bools, since: Ints, step: int) -> Ints:
    """First step of each present stretch of ``flags``; -1 where there is none."""
    return np.where(flags, np.where(since == _NEVER, step, since), _NEVER)


def _suspects(
    state: SaturationState,
    involved: Ints,
    hits: Ints,
    amax: Floats,
    pct: Floats,
    surge: Floats,
) -> tuple[Suspect, ...]:
    """Layers with a saturated tensor, the likeliest cause first.

    A layer's rank comes from all its tensors that moved: saturation may show in its gradient
    while it was the weight that leapt.
    """
    layers = layers_of(state.names)
    saturated = {layers[i] for i in hits.tolist()}

    def key(i: int) -> tuple[bool, int, bool, float, float]:
        backward = state.names[i].endswith("/grad_output")
        return (
            layers[i] not in saturated,
            int(state.moved_since[i]),
            backward,
            -float(surge[i]),
            -float(pct[i]),
        )

    found: dict[str, Suspect] = {}
    for i in sorted(involved.tolist(), key=key):
        layer, role = split_name(state.names[i])
        if layer in saturated and layer not in found:
            evidence = {
                "saturated_pct": float(pct[i]),
                "surge_octaves": float(surge[i]),
                "amax": float(amax[i]),
                "since_step": float(state.moved_since[i]),
            }
            found[layer] = Suspect(layer, role, evidence)
    return tuple(found.values())[:MOST_SUSPECTS]


def _empty(names: tuple[str, ...]) -> SaturationState:
    size = len(names)
    return SaturationState(
        names=names,
        reference=np.full(size, np.nan),
        calibrated=np.zeros(size, dtype=np.bool_),
        run=np.zeros(size, dtype=np.int64),
        moved_since=np.full(size, _NEVER, dtype=np.int64),
        before=np.full(size, np.nan),
        worse_since=np.full(size, _NEVER, dtype=np.int64),
    )


def _renamed(state: SaturationState, names: tuple[str, ...]) -> SaturationState:
    """The state for another set of tensors: known ones keep theirs."""
    known = {name: i for i, name in enumerate(state.names)}
    pairs = [(new, known[name]) for new, name in enumerate(names) if name in known]
    following = _empty(names)
    if not pairs:
        return following
    new, old = (list(column) for column in zip(*pairs, strict=True))
    following.reference[new] = state.reference[old]
    following.calibrated[new] = state.calibrated[old]
    following.run[new] = state.run[old]
    following.moved_since[new] = state.moved_since[old]
    following.before[new] = state.before[old]
    following.worse_since[new] = state.worse_since[old]
    return following
