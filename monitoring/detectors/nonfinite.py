"""Non-finite losses and gradients.

Sees: a step whose update was left out because a gradient was not finite, a loss or norm
that is NaN or infinite, ranks that flagged their own. Statistic: none, one is enough.
Must not fire on: large but finite values.
"""

from __future__ import annotations

import math
from typing import Any

from monitoring.amax import split_name
from monitoring.detectors.base import Detector, register
from monitoring.records import Incident, StepRecord, Suspect

MOST_SUSPECTS = 8


@register
class NonFinite(Detector[None]):
    """Fires at every step that had a non-finite loss or gradient."""

    name = "nonfinite"

    def initial(self) -> None:
        return None

    def dump(self, state: None) -> Any:
        return None

    def load(self, row: Any) -> None:
        return None

    def counts_while_settling(self, incident: Incident) -> bool:
        return True

    def observe(self, state: None, record: StepRecord) -> tuple[None, list[Incident]]:
        finite = math.isfinite(record.loss) and math.isfinite(record.grad_norm)
        if finite and not record.skipped and not record.nonfinite_ranks:
            return None, []
        incident = self.incident(
            record,
            onset_step=record.step,
            message=_message(record),
            evidence={
                "loss": record.loss,
                "grad_norm": record.grad_norm,
                "update_skipped": float(record.skipped),
                "nonfinite_parameters": float(len(record.nonfinite_parameters)),
            },
            suspects=_suspects(record),
            ranks=record.nonfinite_ranks,
        )
        return None, [incident]


def _message(record: StepRecord) -> str:
    what = "loss" if not math.isfinite(record.loss) else "gradient"
    where = ""
    if record.nonfinite_ranks:
        ranks = ", ".join(str(rank) for rank in record.nonfinite_ranks)
        where = f" on rank{'s' if len(record.nonfinite_ranks) > 1 else ''} {ranks}"
    if record.nonfinite_parameters:
        others = len(record.nonfinite_parameters) - 1
        where += f", first in {record.nonfinite_parameters[0]}"
        where += f" and {others} more" if others else ""
    update = "its update was left out" if record.skipped else "its update was made"
    return f"Non-finite {what} in step {record.step}{where}; {update}."


def _suspects(record: StepRecord) -> tuple[Suspect, ...]:
    """Layers whose operands held non-finite values; else the layers of the parameters named.

    A gradient that came in broken is the effect, an input or weight nearer the cause: those
    come first.
    """
    found = [
        Suspect(*split_name(name), {"nonfinite": float(stats.nonfinite), "amax": stats.amax})
        for name, stats in record.tensors.items()
        if stats.nonfinite
    ]
    found.sort(key=lambda s: s.tensor == "grad_output")
    if not found and record.nonfinite_parameters:
        layers = dict.fromkeys(split_name(name)[0] for name in record.tensors)
        found = [
            Suspect(layer, "weight", {"nonfinite_parameters": 1.0})
            for layer in layers
            if any(f"{layer}." in f"{parameter}." for parameter in record.nonfinite_parameters)
        ]
    first = {suspect.layer: suspect for suspect in reversed(found)}
    ordered = dict.fromkeys(suspect.layer for suspect in found)
    return tuple(first[layer] for layer in ordered)[:MOST_SUSPECTS]
