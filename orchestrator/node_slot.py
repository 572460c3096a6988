"""A node as the job that holds it knows it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class NodeSlot:
    """One node of a job's group: who holds its bundle, and which ranks it takes."""

    node_id: str
    """Ray's node id, hex."""
    node_ip: str
    bundle: int
    """Number within the job's group, of its placement group and its keeper; never used again."""
    slots: int
    spare: bool = False
    """Stands ready, and has no ranks."""


def working(seats: Iterable[NodeSlot]) -> list[NodeSlot]:
    """Those that have ranks, in the order of these."""
    return [seat for seat in seats if not seat.spare]


def homes(seats: Iterable[NodeSlot]) -> dict[int, NodeSlot]:
    """Rank → the seat it has; ranks fill nodes in order."""
    return dict(enumerate(seat for seat in working(seats) for _ in range(seat.slots)))
