"""What is told of a job's nodes, in words. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from orchestrator.events import EventDraft
from orchestrator.node_slot import NodeSlot, working
from orchestrator.placement.accusation import Accusation
from orchestrator.placement.docket import Dismissed, Shared
from orchestrator.placement.placement import Barred, Mended, told_node
from orchestrator.store.nodes import Judged
from orchestrator.store.rows import JobRow


def moves(plan: Mended, lost: set[int], barred: dict[str, Barred], now: float) -> list[EventDraft]:
    """Whose ranks moved, from where to where, and why."""
    told = []
    for old, new in plan.moved:
        why = "is lost" if old.bundle in lost else "is quarantined"
        to = f"node {told_node(new)}" if new in plan.taken else f"the spare {told_node(new)}"
        message = f"Node {told_node(old)} {why}; its ranks move to {to}."
        detail = {
            "from": old.node_id,
            "to": new.node_id,
            "spare": new not in plan.taken,
            "why": barred[old.node_id].reason if old.node_id in barred else "lost",
        }
        told.append(EventDraft("node_replaced", now, message, detail))
    return told


def resized(row: JobRow, plan: Mended, now: float) -> list[EventDraft]:
    """That a job goes on with fewer nodes than it asks for, or with more than it had."""
    before = len(working(row.nodes))
    after = len(working(plan.nodes))
    if before == after:
        return []
    wanted = row.spec.num_nodes
    why = "no other nodes are free" if after < before else "others are free"
    message = f"It goes on on {after} of {wanted} nodes, after {before}: {why}."
    detail = {"nodes": after, "before": before, "num_nodes": wanted}
    return [EventDraft("nodes_resized", now, message, detail)]


def spare_told(seat: NodeSlot, now: float) -> EventDraft:
    """A spare was found."""
    message = f"Node {told_node(seat)} stands ready as a spare."
    return EventDraft("spare_taken", now, message, {"node_id": seat.node_id})


def keeper_told(seat: NodeSlot, now: float) -> EventDraft:
    """A keeper died while the job trains, and was started again."""
    message = (
        f"The keeper of snapshots on {told_node(seat)} died and was started again. What it held is "
        "gone; ranks find it within a second, and it has their state from the next snapshot on."
    )
    return EventDraft("keeper_started", now, message, {"node_id": seat.node_id})


def judged_told(judged: Sequence[Judged], now: float) -> list[EventDraft]:
    """What a person is to know of accusations beside the quarantines that came of them."""
    kept = [
        (case, found.why) for case, found in judged if isinstance(found, Dismissed) and found.news
    ]
    shared = [found for _, found in judged if isinstance(found, Shared)]
    return [*(_node_kept(case, why, now) for case, why in kept), *_not_the_nodes(shared, now)]


def _node_kept(case: Accusation, why: str, now: float) -> EventDraft:
    where = f"{case.address} ({case.node_id[:8]})" if case.address else case.node_id[:8]
    message = f"Node {where} is not quarantined: {why}."
    return EventDraft("node_kept", now, message, {"node_id": case.node_id})


def _not_the_nodes(found: Sequence[Shared], now: float) -> list[EventDraft]:
    """What an attempt's nodes have in common failed its checks; told once for each of that."""
    told = []
    for look_at in dict.fromkeys(one.look_at for one in found):
        these = [one for one in found if one.look_at == look_at]
        last = these[-1]
        message = (
            f"Preflight failed alike on {last.nodes} nodes, which is hardly their fault: they are "
            f"left out for {last.entry.job} alone. Look at {look_at}."
        )
        detail = {
            "nodes": [one.entry.node_id for one in these],
            "released": [q.node_id for one in these for q in one.taken_back],
            "look_at": look_at,
        }
        told.append(EventDraft("nodes_alike", now, message, detail))
    return told
