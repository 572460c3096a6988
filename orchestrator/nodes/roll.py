"""The nodes as people see them, and what people do about one by hand.

Promises: a node is known by its address, host name, Ray's id or a unique beginning of it, and one
that several could be is refused with which; a quarantine by hand is stored with who asked and why,
and the jobs on the node are told.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, replace
from typing import Any

from orchestrator.nodes.groups import NodeGroups
from orchestrator.placement.accusation import machine_addresses
from orchestrator.placement.placement import NodeCapacity
from orchestrator.placement.quarantine import Quarantine
from orchestrator.store.database import Store


class NodeNotFoundError(KeyError):
    """No node goes by this word, or several do."""

    def __str__(self) -> str:
        return str(self.args[0])


@dataclass(frozen=True, slots=True)
class NodeView:
    """A node as people see it."""

    node_id: str
    address: str
    name: str
    alive: bool
    total: dict[str, float]
    free: dict[str, float]
    held_by: tuple[tuple[str, int, bool], ...]
    """(job, slots, spare)."""
    quarantine: Quarantine | None

    def to_json(self) -> dict[str, Any]:
        held = [{"job": j, "slots": s, "spare": spare} for j, s, spare in self.held_by]
        row = {**asdict(self), "held_by": held}
        row["quarantine"] = None if self.quarantine is None else asdict(self.quarantine)
        return row


class NodeRoll:
    """The nodes of one controller."""

    def __init__(self, store: Store, groups: NodeGroups) -> None:
        self._store = store
        self._groups = groups

    def view(self, now: float) -> list[NodeView]:
        """All nodes that live, and those that are quarantined and don't."""
        nodes = self._groups.capacities()
        held: dict[str, list[tuple[str, int, bool]]] = {}
        for row in self._store.tended.seated():
            for seat in row.nodes:
                held.setdefault(seat.node_id, []).append((row.id, seat.slots, seat.spare))
        entries = self._store.nodes.in_force(now)
        views = []
        for node in nodes:
            mine = [q for q in entries if q.concerns(node)]
            views.append(_view(node, True, held, max(mine, key=_lasts, default=None)))
        for entry in entries:
            if not any(entry.concerns(node) for node in nodes):
                gone = NodeCapacity(entry.node_id, {}, {}, entry.address)
                views.append(_view(gone, False, held, entry))
        return views

    def quarantine(
        self, word: str, reason: str, by: str, seconds: float | None, now: float
    ) -> NodeView:
        """Leave a node out by hand, for ``seconds`` or until it is released.

        Jobs that are on it are told, and go on there until they start anew.
        """
        node = self._named(word, now)
        addresses = machine_addresses(self._groups.capacities())
        address = addresses.get(node.node_id, node.address if not node.alive else "")
        until = None if seconds is None else now + seconds
        told = f"{reason[0].upper()}{reason[1:].rstrip('. ')}."
        entry = Quarantine(node.node_id, address, "by_hand", told, by, "", now, until)
        rows = [self._store.job(job) for job, _, _ in node.held_by]
        self._store.nodes.quarantine(entry, [(row.id, row.attempt) for row in rows])
        return replace(node, quarantine=entry)

    def release(self, word: str, by: str, now: float) -> NodeView:
        """End a node's quarantine, whatever it is for. ``NodeNotFoundError`` where it has none."""
        node = self._named(word, now)
        if node.quarantine is None:
            raise NodeNotFoundError(f"node {node.address or node.node_id[:8]} is not quarantined")
        seat = NodeCapacity(node.node_id, {}, {}, node.address)
        for entry in self._store.nodes.in_force(now):
            if entry.concerns(seat):
                self._store.nodes.release(entry, by, now)
        return replace(node, quarantine=None)

    def _named(self, word: str, now: float) -> NodeView:
        """The node with this address, host name, id or unique beginning of an id."""
        views = self.view(now)
        for of in (lambda v: v.node_id, lambda v: v.address, lambda v: v.name):
            found = [v for v in views if of(v) == word]
            if len(found) == 1:
                return found[0]
        found = [v for v in views if word and v.node_id.startswith(word)]
        if len(found) == 1:
            return found[0]
        listed = ", ".join(sorted({v.address or v.node_id[:8] for v in views})[:10])
        several = [v.node_id[:8] for v in views if word in (v.address, v.name)] or [
            v.node_id[:12] for v in found
        ]
        if several:
            raise NodeNotFoundError(f"{word!r} could be {', '.join(several)}: name it by its id")
        raise NodeNotFoundError(f"there is no node {word!r}; there are {listed or 'none'}")


def _lasts(entry: Quarantine) -> float:
    """Until when; of several that one is told."""
    return math.inf if entry.until is None else entry.until


def _view(
    node: NodeCapacity,
    alive: bool,
    held: dict[str, list[tuple[str, int, bool]]],
    entry: Quarantine | None,
) -> NodeView:
    def slots(of: dict[str, float]) -> dict[str, float]:
        return {k: of[k] for k in ("CPU", "GPU") if k in of}

    return NodeView(
        node.node_id,
        node.address,
        node.name,
        alive,
        slots(node.total),
        slots(node.free),
        tuple(held.get(node.node_id, ())),
        entry,
    )
