"""Where the copies of one rank's state are, outside its own process."""

from __future__ import annotations

from dataclasses import dataclass

from launch.snapshots import PartnerCopies, SnapshotSource, SnapshotStore


@dataclass(frozen=True, slots=True)
class Stores:
    """What a training loop is given; each part may be missing."""

    own: SnapshotStore | None = None
    """Its node's keeper."""
    partners: PartnerCopies | None = None
    """Other nodes' keepers that get a copy."""
    sources: tuple[tuple[str, SnapshotSource], ...] = ()
    """What it may start from, the nearest first, each with its tier: memory or partner."""
    held_nbytes: int = 0
    """Memory that its node's keeper takes already."""


def only(keeper: SnapshotStore | None) -> Stores:
    """One keeper, and no other nodes."""
    return NO_STORES if keeper is None else Stores(keeper, sources=(("memory", keeper),))


NO_STORES = Stores()
