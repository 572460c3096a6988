"""What the next attempt starts from, computed from stored records alone. Pure.

Promises: the same records give the same answer, so a supervisor that starts after any
crash skips the same batches, in the same precision, at the same learning rate, and
fires no drill twice.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from launch.drills.config import KillRank
from monitoring.records import Incident
from orchestrator.actions import Action
from orchestrator.spec.job import JobSpec
from parallel.config import ExchangeDtype, Precision

REPORT_LAG = 64
"""Steps that a rank may have run without their record being stored when it dies."""

NEWEST_STEPS = 512
"""Records whose batches the next attempt knows: a rollback skips no further back by far."""

NEWEST_WRITTEN = 1024
"""Events of written checkpoints and of actions that it knows; far fewer checkpoints are kept."""


@dataclass(frozen=True, slots=True)
class Standing:
    """The sum of a job's actions."""

    timeline: int
    ledger: tuple[int, ...]
    precision: Mapping[str, Precision]
    """Layers that differ from the spec's precision."""
    lr_scale: float
    exchange: ExchangeDtype | None
    """What gradients cross the network in; None: not decided yet."""


def standing(spec: JobSpec, actions: Sequence[Action]) -> Standing:
    """Where ``actions`` (oldest first) have brought a job."""
    timeline, lr_scale = 0, 1.0
    ledger: set[int] = set()
    precision: dict[str, Precision] = {}
    asked = spec.communication_data_type
    exchange: ExchangeDtype | None = None if asked == "auto" else asked
    for action in actions:
        if action.to_step is not None and action.in_place:
            # A rollback begins the timeline after the one it was decided in. What ends
            # the ranks stays on its timeline: the attempt tells its steps apart.
            timeline = max(timeline, action.timeline + 1)
        ledger.update(action.skip_batches)
        precision.update(action.precision)
        if action.lr_scale is not None:
            lr_scale = action.lr_scale
        exchange = action.exchange or exchange
    differing = {layer: p for layer, p in precision.items() if p != spec.precision}
    return Standing(timeline, tuple(sorted(ledger)), differing, lr_scale, exchange)


def batches_of(records: Iterable[tuple[int, int]]) -> dict[int, int]:
    """Batch of each step, from (step, batch) of the newest records, oldest first.

    A step that was done again has the batch that it had last.
    """
    return dict(deque(records, maxlen=NEWEST_STEPS))


def fired_drills(
    spec: JobSpec, recorded: Iterable[int], incidents: Sequence[Incident]
) -> tuple[int, ...]:
    """Indices of drills that have fired: those in step records, and ranks killed on purpose.

    A killed rank leaves no record of its last step. A drill that kills is taken to have
    fired when its rank died no more than ``REPORT_LAG`` steps before the drill's step.
    """
    fired = set(recorded)
    deaths = [(i.step, i.ranks) for i in incidents if i.kind == "rank_died"]
    for index, drill in enumerate(spec.drills):
        if isinstance(drill, KillRank) and any(
            drill.rank in ranks and drill.step <= step + REPORT_LAG for step, ranks in deaths
        ):
            fired.add(index)
    return tuple(sorted(fired))
