"""Tensors whose values are flushed to zero.

Sees: the percent of each tensor's non-zero values that became zero. Statistic: the percent above
a slow average of the tensor's own healthy steps. Fires when it is ``underflow_pct`` or more for
``underflow_patience`` steps. Silent for a tensor until ``min_history`` of its steps were seen.

Must not fire on: the first step of delayed scaling, whose scale has seen no data; layers in BF16;
a tensor that has always lost as much; a step or two after an outlier that a delayed scale hasn't
left yet.
"""

from __future__ import annotations

import numpy as np

from monitoring.detectors.base import RowsDetector, register
from monitoring.detectors.tensors import TensorRows, or_zero, since_when, suspects, table_of
from monitoring.records import Incident, StepRecord

FIELDS = ("usual", "count", "run", "since")
"""Average percent; healthy steps seen, up to ``window``; steps in a row that lost too much, and
the first of them."""


@register
class Underflow(RowsDetector):
    """Fires when a tensor loses many more values to zero than it used to."""

    name = "underflow"
    fields = FIELDS

    def observe(self, state: TensorRows, record: StepRecord) -> tuple[TensorRows, list[Incident]]:
        if not record.tensors or record.skipped:
            return state, []
        config, table = self.config, table_of(record)
        usual, count, run, since = (rows := state.named(table.names)).fields()
        count, run = or_zero(count), or_zero(run)
        measured = np.isfinite(table.underflow_pct) & ~np.isnan(table.octaves)
        measured &= ~table.in_bf16
        measured &= table.calibrated

        more = np.where(measured, table.underflow_pct - or_zero(usual), 0.0)
        lost = measured & (count >= config.min_history) & (more >= config.underflow_pct)
        run = np.where(lost, run + 1, 0)
        since = since_when(lost, since, record.step)
        healthy = measured & ~lost
        share = np.maximum(1.0 / (count + 1.0), 2.0 / (config.window + 1.0))
        usual = np.where(healthy, or_zero(usual) + share * more, usual)
        count = np.where(healthy, np.minimum(count + 1, config.window), count)
        following = TensorRows.of(rows.names, (usual, count, run, since))
        hits = run >= config.underflow_patience
        if not hits.any():
            return following, []

        evidence = {"underflow_pct": table.underflow_pct, "usual_pct": usual, "amax": table.amax}
        found = suspects(table.names, lost, since, more, evidence)
        worst = int(np.argmax(np.where(hits, more, -np.inf)))
        incident = self.incident(
            record,
            onset_step=int(since[hits].min()),
            message=(
                f"{table.names[worst]} had {table.underflow_pct[worst]:.1f} % of its values "
                f"flushed to zero in step {record.step}, where {usual[worst]:.1f} % is usual "
                f"(limit {config.underflow_pct:g} % more for {config.underflow_patience} steps); "
                f"first to move was {found[0].layer} in step "
                f"{found[0].evidence['since_step']:.0f}."
            ),
            evidence={
                "underflow_pct": float(table.underflow_pct[worst]),
                "usual_pct": float(usual[worst]),
                "tensors": float(np.count_nonzero(hits)),
            },
            suspects=found,
        )
        return following, [incident]
