"""A job's nodes where their number may vary: ``resources.min_nodes``. Pure.

With every start of its ranks a job gets as many nodes as it asks for, or else the largest number
of nodes on which its replicas can share the batch (``spec.degrees.node_counts``). Promises:
seats that can stay do; which of them go is decided by what is wrong with them, the lost ones first;
fewer nodes come before going on on one that corrupts what is trained or loses its ranks.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

from orchestrator.node_slot import NodeSlot, working
from orchestrator.placement.placement import Barred, Mended, Need, NodeCapacity, Short, mend, place
from orchestrator.spec.degrees import node_counts
from orchestrator.spec.job import JobSpec


def counts_of(spec: JobSpec) -> tuple[int, ...]:
    """Numbers of nodes that a job may run on, the most first; its own alone without min_nodes."""
    least = spec.resources.min_nodes
    return (spec.num_nodes,) if least is None else tuple(node_counts(spec, least))


def place_some(
    need: Need, counts: Sequence[int], nodes: Sequence[NodeCapacity], barred: Collection[str] = ()
) -> tuple[NodeSlot, ...] | None:
    """The seats of a new group of the largest of ``counts`` that fits; None where none does."""
    groups = (place(replace(need, nodes=count), nodes, barred) for count in counts)
    return next((group for group in groups if group is not None), None)


def mend_some(
    group: Sequence[NodeSlot],
    need: Need,
    counts: Sequence[int],
    nodes: Sequence[NodeCapacity],
    *,
    lost: Collection[int] = (),
    barred: Mapping[str, Barred] = {},
    waits: bool = False,
    numbered: int = -1,
) -> Mended | Short:
    """``placement.mend`` for the largest of ``counts`` for which there are nodes, if need be slow
    ones; where none does without barred ones, that which goes on on the fewest of them.

    Of a group that is smaller than it may be, more seats are filled; of one that can't be made
    whole, some go. Short: of the least of ``counts``, where none of them can be had.
    """
    assert counts, "there is at least one"
    short = Short(0, "")
    best: Mended | None = None
    fewest = 0
    for count in counts:
        resized, missing = _resized(group, need, count, lost, barred)
        plan = mend(
            resized,
            need,
            nodes,
            lost={*lost, *missing},
            barred=barred,
            waits=waits,
            numbered=max(numbered, *(seat.bundle for seat in group), -1),
        )
        if isinstance(plan, Short):
            short = plan
            continue
        stayed = sum(not barred[seat.node_id].slow for seat in plan.stayed)
        if best is None or stayed < fewest:
            held = {seat.bundle for seat in plan.nodes}
            fewest = stayed
            best = replace(
                plan,
                dropped=tuple(seat for seat in group if seat.bundle not in held),
                moved=tuple(pair for pair in plan.moved if pair[0].bundle not in missing),
            )
        if not fewest:
            break
    return best or short


def _resized(
    group: Sequence[NodeSlot],
    need: Need,
    count: int,
    lost: Collection[int],
    barred: Mapping[str, Barred],
) -> tuple[list[NodeSlot], set[int]]:
    """The group with ``count`` working seats, and the bundles of those that are yet to be found."""
    seated = working(group)
    spares = [seat for seat in group if seat.spare]

    def good(seat: NodeSlot) -> int:
        out = barred.get(seat.node_id)
        if seat.bundle in lost:
            return 0
        return 4 if out is None else 3 if out.slow else 2 if out.may_stay else 1

    worst = sorted(seated, key=lambda seat: (good(seat), -seated.index(seat)))
    gone = {seat.bundle for seat in worst[: max(0, len(seated) - count)]}
    kept = [seat for seat in seated if seat.bundle not in gone]
    fresh = max((seat.bundle for seat in group), default=-1) + 1
    more = [NodeSlot("", "", fresh + i, need.slots) for i in range(count - len(kept))]
    return [*kept, *more, *spares], {seat.bundle for seat in more}
