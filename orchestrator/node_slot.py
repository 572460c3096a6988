"""A node as the job that holds it knows it."""

from __future__ import annotations

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
