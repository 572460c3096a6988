"""Nodes and quarantines as one pass sees them, and what jobs that wait would have of them.

Promises: all answers of one sight are of the same moment; the store isn't asked for any.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from orchestrator.node_slot import NodeSlot
from orchestrator.placement.asks import Asks
from orchestrator.placement.placement import (
    Barred,
    Fit,
    Mended,
    NodeCapacity,
    Resource,
    Short,
    fit,
    ready_nodes,
)
from orchestrator.placement.quarantine import Quarantine, barring
from orchestrator.placement.regroup import mend_some
from orchestrator.store.rows import JobRow


@dataclass(frozen=True)
class Sight:
    """Nodes and quarantines at one time."""

    nodes: list[NodeCapacity]
    quarantines: list[Quarantine]
    now: float
    _fits: dict[tuple[str, int], tuple[Asks, Fit]] = field(
        default_factory=dict, compare=False, repr=False
    )
    """Answers: a queue of thousands asks for few different things."""

    @cached_property
    def _unfit(self) -> frozenset[str]:
        """Jobs that some node is left out for alone."""
        return frozenset(entry.job for entry in self.quarantines if entry.kind == "unfit")

    @cached_property
    def alive(self) -> frozenset[str]:
        """Ids of the nodes that are there."""
        return frozenset(node.node_id for node in self.nodes)

    def told(self) -> object:
        """All that it says, whenever it was looked at."""
        active = [q for q in self.quarantines if q.active(self.now)]
        return (self.nodes, active)

    def barred(self, job: str) -> dict[str, Barred]:
        """Nodes that ``job`` can't be given."""
        return barring(self.quarantines, self.nodes, job, self.now)

    def fit(self, row: JobRow) -> Fit:
        """Whether a queued job can be given nodes that it may begin on, now and ever."""
        # As an object: comparing thousands of equal values is what a pass has no time for.
        key = (row.id if row.id in self._unfit else "", id(row.asks))
        known = self._fits.get(key)
        if known is None:
            asks, barred = row.asks, self.barred(row.id)
            known = self._fits[key] = (asks, fit(asks.need, self.nodes, barred, asks.least))
        return known[1]

    def fits_with(
        self, row: JobRow, back: Iterable[tuple[Resource, NodeSlot]], missing: int | None
    ) -> bool:
        """Whether a job would have what it waits for once these seats had been given ``back``:
        the ``missing`` nodes in place of lost ones, or those that it needs to begin."""
        more: dict[tuple[str, str], float] = {}
        for resource, seat in back:
            key = (seat.node_id, resource)
            more[key] = more.get(key, 0.0) + seat.slots
        freed = [
            replace(
                node,
                free={
                    k: min(node.total.get(k, 0.0), f + more.get((node.node_id, k), 0.0))
                    for k, f in node.free.items()
                },
            )
            for node in self.nodes
        ]
        count = row.asks.least if missing is None else missing
        mine = {seat.node_id for seat in row.nodes}
        return len(ready_nodes(row.asks.need, freed, self.barred(row.id), mine)) >= count

    def mended(self, row: JobRow) -> Mended | Short:
        """Where a job that holds nodes would stand if it started anew now."""
        return mend_some(
            row.nodes,
            row.asks.need,
            row.asks.counts,
            self.nodes,
            lost={seat.bundle for seat in row.nodes if seat.node_id not in self.alive},
            barred=self.barred(row.id),
            waits=row.spec.recovery.no_other_node == "wait",
        )

    def without(self, row: JobRow, seats: Sequence[NodeSlot]) -> Sight:
        """As it will be when the job has taken these seats."""
        taken = {seat.node_id: seat.slots for seat in seats}
        resource = row.asks.need.resource
        nodes = [
            replace(node, free={**node.free, resource: free - taken[node.node_id]})
            if node.node_id in taken and (free := node.free.get(resource, 0.0))
            else node
            for node in self.nodes
        ]
        return Sight(nodes, self.quarantines, self.now)

    def without_nodes(self, gone: Collection[str]) -> Sight:
        """As it would be if nothing were free on these nodes."""
        nodes = [
            replace(node, free=dict.fromkeys(node.free, 0.0)) if node.node_id in gone else node
            for node in self.nodes
        ]
        return Sight(nodes, self.quarantines, self.now)
