"""Tensors whose amax leaves their own history upwards.

Sees: log2(amax) of each tensor. Statistic: its octaves above a slow average of its own healthy
steps, and as many robust deviations (mean absolute, each held to three of those before). Fires
when a forward operand (input, weight) is ``amax_surge_octaves`` and ``amax_sigmas`` above for
``amax_patience`` steps, or twice the octaves in one. Silent for a tensor until ``window`` of its
steps were seen: in warm-up amaxs grow by octaves for good reasons.

Must not fire on: gradients, whose amax jumps by octaves with the loss, the batch and the learning
rate (they are named beside a forward operand that moved); layers in BF16; drift; a new level that
has lasted for a window.

It also keeps who has moved by an octave and since when, for incidents that see no tensors.
"""

from __future__ import annotations

import numpy as np

from monitoring.detectors.base import RowsDetector, register
from monitoring.detectors.tensors import (
    Bools,
    Floats,
    TensorRows,
    are_backward,
    or_zero,
    since_when,
    suspects,
    table_of,
)
from monitoring.records import Incident, StepRecord, Suspect

MOVED_OCTAVES = 1.0
"""Octaves above its history from which a tensor has moved, if they are ``amax_sigmas`` too."""
LEAST_SPREAD = 0.15
"""Least deviation of log2(amax), a tenth of the amax."""
MEAN_TO_SIGMA = 1.2533
"""Standard deviation of a normal distribution over its mean absolute deviation."""
MOST_DEVIATIONS = 3.0
"""Mean deviations that a healthy step counts for at most."""

ODD_OCTAVES = 0.5
"""Octaves above its history from which a value stays out of it, if they are half of
``amax_sigmas`` too: else growth would raise level and spread before it is seen."""

ONSET_SHARE = 0.5
"""Share of ``amax_surge_octaves`` from which a stretch is counted to the surge that follows: a
level that is an octave higher and stays is healthy, however long before."""

FIELDS = ("level", "spread", "count", "run", "since", "moved", "high")
"""Average octaves; mean absolute deviation; healthy steps seen, up to ``window``; surging steps in
a row; first step of the present stretch of values that stay out; 1 where it has moved by now; first
step of the present stretch of values that are ``ONSET_SHARE`` of a surge."""


@register
class AmaxSurge(RowsDetector):
    """Fires when an input's or a weight's amax is far above its own history."""

    name = "amax_surge"
    fields = FIELDS

    def observe(self, state: TensorRows, record: StepRecord) -> tuple[TensorRows, list[Incident]]:
        if not record.tensors or record.skipped:
            return state, []
        config, table = self.config, table_of(record)
        state = state.named(table.names)
        level, spread, count, run, since, _, high = state.fields()
        spread, count, run = or_zero(spread), or_zero(count), or_zero(run)

        seen = ~np.isnan(table.octaves)
        running = seen & ~table.in_bf16
        rise = np.where(np.isnan(level) | ~seen, 0.0, table.octaves - level)
        sigmas = rise / np.maximum(MEAN_TO_SIGMA * spread, LEAST_SPREAD)
        known = running & (count >= config.window)
        odd = known & (rise >= ODD_OCTAVES) & (sigmas >= config.amax_sigmas / 2)
        moved = odd & (rise >= MOVED_OCTAVES) & (sigmas >= config.amax_sigmas)
        surging = moved & (rise >= config.amax_surge_octaves) & ~table.backward
        # A tensor in BF16 or without an amax keeps nothing of a stretch before it.
        since = since_when(odd, since, record.step)
        high = since_when(
            odd & (rise >= ONSET_SHARE * config.amax_surge_octaves), high, record.step
        )
        run = np.where(surging, run + 1, 0)

        # Who stays where it went for a window has found a new level: its history begins anew.
        stays = odd & (record.step - since >= config.window)
        count = np.where(stays, 0, count)
        healthy = seen & (~odd | stays)
        share = np.maximum(1.0 / (count + 1.0), 2.0 / (config.window + 1.0))
        deviation = np.minimum(np.abs(rise), MOST_DEVIATIONS * np.maximum(spread, LEAST_SPREAD))
        risen = np.where(count == 0, table.octaves, level + share * rise)
        spread = np.where(healthy & (count > 0), spread + share * (deviation - spread), spread)
        level = np.where(healthy, risen, level)
        count = np.where(healthy, np.minimum(count + 1, config.window), count)
        since, run = np.where(stays, np.nan, since), np.where(stays, 0, run)

        values = (level, spread, count, run, since, moved & ~stays, high)
        following = TensorRows.of(table.names, values)
        hits = (run >= config.amax_patience) | (surging & (rise >= 2 * config.amax_surge_octaves))
        # A level that has just become its own history is no surge any more, however high.
        hits &= ~stays
        if not hits.any():
            return following, []
        incident = self._incident(record, hits, moved, since, high, rise, sigmas)
        return following, [incident]

    def moved_before(self, state: TensorRows, step: int) -> tuple[Suspect, ...]:
        if not state.names:
            return ()
        level, _, _, _, since, has_moved, _ = state.fields()
        moved = (has_moved > 0.0) & (since < step) & ~are_backward(state.names)
        if not moved.any():
            return ()
        return suspects(state.names, moved, since, -since, {"usual_log2_amax": level})

    def _incident(
        self,
        record: StepRecord,
        hits: Bools,
        moved: Bools,
        since: Floats,
        high: Floats,
        rise: Floats,
        sigmas: Floats,
    ) -> Incident:
        table = table_of(record)
        worst = int(np.argmax(np.where(hits, rise, -np.inf)))
        usual = float(np.exp2(table.octaves[worst] - rise[worst]))
        evidence = {
            "amax": table.amax,
            "surge_octaves": rise,
            "sigmas": sigmas,
            "usual_amax": np.exp2(table.octaves - rise),
        }
        found = suspects(table.names, moved, since, rise, evidence)
        onset = int(high[hits].min())
        return self.incident(
            record,
            onset_step=onset,
            message=(
                f"{table.names[worst]} reached {table.amax[worst]:.3g} in step {record.step}, "
                f"{rise[worst]:.1f} octaves above its usual {usual:.3g} and {sigmas[worst]:.0f} "
                f"robust deviations out (limits {self.config.amax_surge_octaves:g}, "
                f"{self.config.amax_sigmas:g}); first to move was {found[0].layer}, its "
                f"{found[0].tensor} since step {found[0].evidence['since_step']:.0f}."
            ),
            evidence={
                "surge_octaves": float(rise[worst]),
                "sigmas": float(sigmas[worst]),
                "surging_tensors": float(np.count_nonzero(hits)),
            },
            suspects=found,
        )
