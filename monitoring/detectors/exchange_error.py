"""Coarse rounding of gradients on their way between replicas.

Sees: the FP8 exchange's relative error, the norm of what rounding took of the gradients over
their norm. Statistic: how many of the last ``exchange_error_window`` steps it was above
``exchange_error`` in. Fires when they are ``exchange_error_steps``, once: then not before a
whole window without one, or an exchange that was in another dtype meanwhile.

Must not fire on: single bad steps; steps whose update was left out; gradients in BF16 or FP32,
whose rounding isn't measured. Silent without a limit.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from monitoring.detectors.base import Detector, register
from monitoring.records import EXCHANGE_BITS, Incident, StepRecord


@dataclass(frozen=True, slots=True)
class CoarseSteps:
    """What is remembered of the window."""

    steps: tuple[tuple[int, float], ...] = ()
    """Steps above the limit with their error, oldest first."""
    told: bool = False
    """They have been reported."""


@register
class ExchangeError(Detector[CoarseSteps]):
    """Fires when the exchange rounds too coarsely for too long."""

    name = "exchange_error"
    of_facts = True

    def initial(self) -> CoarseSteps:
        return CoarseSteps()

    def dump(self, state: CoarseSteps) -> Any:
        return {"steps": [list(step) for step in state.steps], "told": state.told}

    def load(self, row: Any) -> CoarseSteps:
        return CoarseSteps(tuple((int(s), float(e)) for s, e in row["steps"]), bool(row["told"]))

    def counts_while_settling(self, incident: Incident) -> bool:
        # Rounding has no baseline that would have to settle.
        return True

    def observe(self, state: CoarseSteps, record: StepRecord) -> tuple[CoarseSteps, list[Incident]]:
        limit = self.config.exchange_error
        if limit is None or record.skipped:
            return state, []
        if EXCHANGE_BITS.get(int(record.comm.get("wire_bits", 8))) != "fp8":
            return CoarseSteps(), []
        oldest = record.step - self.config.exchange_error_window + 1
        steps = tuple(step for step in state.steps if step[0] >= oldest)
        error = record.comm.get("relative_error", 0.0)
        if error > limit:
            steps = (*steps, (record.step, error))
        told = state.told and bool(steps)
        if told or len(steps) < self.config.exchange_error_steps:
            return CoarseSteps(steps, told), []
        return CoarseSteps(steps, True), [self._incident(record, steps, limit)]

    def _incident(
        self, record: StepRecord, steps: tuple[tuple[int, float], ...], limit: float
    ) -> Incident:
        error = sum(error for _, error in steps) / len(steps)
        window = self.config.exchange_error_window
        return self.incident(
            record,
            # Nothing is bad from before: gradients were rounded, and nothing is undone.
            onset_step=record.step,
            message=(
                f"The FP8 exchange took {100 * error:.2g} % of the gradients' norm by rounding in "
                f"{len(steps)} of the last {window} steps, step {record.step} the newest "
                f"(limits {100 * limit:.2g} %, {self.config.exchange_error_steps} steps)."
            ),
            evidence={
                "relative_error": error,
                "limit": limit,
                "steps": float(len(steps)),
                "first_step": float(steps[0][0]),
            },
        )
