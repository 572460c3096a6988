"""Replicas whose parameters are not the same: silent corruption.

Sees: the comparison of the parameters' checksums among data-parallel ranks, every so many steps
(``StepRecord.replicas``; see ``parallel.replica_check``). Statistic: none, one bit is enough.
Fires at every comparison that differs. The state is taken to be good up to the last comparison
that didn't, so that a way back lands there.

Must not fire on: steps without a comparison; one replica.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from monitoring.detectors.base import Detector, register
from monitoring.records import Incident, ReplicaComparison, StepRecord, Suspect


@dataclass(frozen=True, slots=True)
class GoodUntil:
    """Newest step before which all replicas were seen to be the same."""

    step: int | None = None
    """Of the last comparison without a difference; before any, the first step seen."""


@register
class ReplicaDisagreement(Detector[GoodUntil]):
    """Fires when data-parallel ranks hold different parameters."""

    name = "replica_disagreement"
    of_facts = True

    def initial(self) -> GoodUntil:
        return GoodUntil()

    def dump(self, state: GoodUntil) -> Any:
        return state.step

    def load(self, row: Any) -> GoodUntil:
        return GoodUntil(None if row is None else int(row))

    def counts_while_settling(self, incident: Incident) -> bool:
        return True

    def observe(self, state: GoodUntil, record: StepRecord) -> tuple[GoodUntil, list[Incident]]:
        found = record.replicas
        if state.step is not None and state.step > record.step:
            # Gone back to before the newest comparison: what comes now was not in it.
            state = GoodUntil(record.step)
        if found is None or not found.parameters:
            same = state.step is None or found is not None
            return (GoodUntil(record.step) if same else state), []
        onset = record.step if state.step is None else state.step
        return GoodUntil(onset), [self._incident(record, found, onset)]

    def _incident(self, record: StepRecord, found: ReplicaComparison, onset: int) -> Incident:
        others = len(found.parameters) - 1
        which = found.parameters[0] + (f" and {others} more parameters" if others else "")
        ranks = ", ".join(map(str, found.ranks))
        subject = f"rank {ranks} differs" if len(found.ranks) == 1 else f"ranks {ranks} differ"
        who = (
            f"{subject} from the other replicas"
            if found.outvoted
            else f"{subject}, and which of them is right can't be told"
        )
        return self.incident(
            record,
            onset_step=onset,
            message=(
                f"Before step {record.step} the replicas' parameters were not the same: {who} in "
                f"{which}; they were last seen to be the same before step {onset}."
            ),
            evidence={
                "parameters": float(len(found.parameters)),
                "outvoted": float(found.outvoted),
                "same_until": float(onset),
            },
            suspects=tuple(
                Suspect(layer, role, {"rank": float(found.ranks[0])})
                for layer, _, role in (name.rpartition(".") for name in found.parameters[:8])
            ),
            ranks=found.ranks,
        )
