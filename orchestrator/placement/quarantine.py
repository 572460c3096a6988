"""Which nodes are not to be used for a while, and why. Pure.

Promises: every quarantine has a reason; a machine is found by either of the names that it has; what
it takes grows with the nodes and with what is held against them, not with the one times the other.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from orchestrator.node_slot import NodeSlot
from orchestrator.placement.placement import Barred, NodeCapacity

QuarantineKind = Literal["ranks_lost", "corruption", "slow", "preflight", "unfit", "by_hand"]


@dataclass(frozen=True, slots=True)
class Quarantine:
    """A node that is left out."""

    node_id: str
    address: str
    kind: QuarantineKind
    reason: str
    """One sentence for a person."""
    by: str
    """Who asked for it; empty: the controller."""
    job: str
    """Whose ranks showed it; empty where none did."""
    since: float
    until: float | None
    """None: until somebody releases it."""
    released_at: float | None = None

    @property
    def taken_back(self) -> bool:
        """Whether it turned out to be no fault of the node's: as if it had never been."""
        return self.released_at == self.since

    def active(self, now: float) -> bool:
        """Whether it is in force."""
        return self.released_at is None and (self.until is None or now < self.until)

    def concerns(self, node: NodeCapacity | NodeSlot) -> bool:
        """Whether this is the machine: by Ray's id, or by its address after a restart."""
        address = _address(node)
        return node.node_id == self.node_id or (bool(self.address) and address == self.address)

    def keeps_out(self, job: str, now: float) -> bool:
        """Whether it is in force, and ``job`` is not to be there for it."""
        return self.active(now) and (self.kind != "unfit" or self.job == job)


class ByMachine:
    """Quarantines, found again by either of the names that a machine has."""

    def __init__(self, entries: Iterable[Quarantine]) -> None:
        self._entries: dict[int, Quarantine] = {}
        self._named: dict[tuple[str, str], list[int]] = {}
        self._next = 0
        for entry in entries:
            self.add(entry)

    def add(self, entry: Quarantine) -> None:
        self._entries[self._next] = entry
        for name in names_of(entry.node_id, entry.address):
            self._named.setdefault(name, []).append(self._next)
        self._next += 1

    def drop(self, entry: Quarantine) -> None:
        for number in self._numbers(entry.node_id, entry.address):
            if self._entries[number] == entry:
                del self._entries[number]

    def of(self, node_id: str, address: str) -> list[Quarantine]:
        """In the order in which they came."""
        return [self._entries[n] for n in self._numbers(node_id, address)]

    def every(self) -> list[Quarantine]:
        return list(self._entries.values())

    def _numbers(self, node_id: str, address: str) -> list[int]:
        found = {n for name in names_of(node_id, address) for n in self._named.get(name, ())}
        return sorted(found & self._entries.keys())


def barring(
    quarantines: Iterable[Quarantine],
    nodes: Iterable[NodeCapacity | NodeSlot],
    job: str,
    now: float,
) -> dict[str, Barred]:
    """Nodes that ``job`` can't be given now, by id."""
    against = ByMachine(entry for entry in quarantines if entry.keeps_out(job, now))
    found: dict[str, Barred] = {}
    for node in nodes:
        for entry in against.of(node.node_id, _address(node)):
            unusable = entry.kind in ("unfit", "preflight")
            slow = entry.kind == "slow"
            before = found.get(node.node_id)
            if before is None or before.slow or (before.may_stay and not slow):
                # What makes it unusable counts, whatever else is held against it.
                found[node.node_id] = Barred(entry.reason, not unusable, slow)
    return found


def _address(node: NodeCapacity | NodeSlot) -> str:
    return node.node_ip if isinstance(node, NodeSlot) else node.address


def names_of(node_id: str, address: str) -> list[tuple[str, str]]:
    """By which a machine is known."""
    return [("id", node_id), *([("address", address)] if address else [])]
