"""Which steps are held outside the ranks, on their own nodes and on partners. Pure.

Promises: copies are counted, not reports of them: one that is told twice is one.
"""

from __future__ import annotations

from collections import defaultdict

from launch.commands import SnapshotReport
from launch.keeper import most_held

MOST_OPEN = 64
"""Steps that some ranks have copies of and others not yet; older ones are given up."""


class CopyBook:
    """The copies of one attempt's ranks in keepers."""

    def __init__(self, world_size: int, replicas: int) -> None:
        self._wanted = {"memory": world_size, "partner": world_size * replicas}
        self._open: dict[tuple[int, int], dict[str, set[tuple[int, int]]]] = {}
        """By timeline and step, then by tier: ranks that have a copy, each with its partner."""
        self._newest = (0, -1)
        self._nbytes: dict[int, int] = {}
        self.complete: int | None = None
        """Newest step that every rank's keeper, and its partners', hold; None: none yet."""

    def add(self, report: SnapshotReport) -> bool:
        """Count a copy; True when it completes the attempt's first step that is held by all."""
        key = (report.timeline, report.step)
        if key <= self._newest:
            return False
        held = self._open.setdefault(key, defaultdict(set))
        held[report.tier].add((report.rank, report.partner))
        self._nbytes[report.rank] = report.nbytes
        while len(self._open) > MOST_OPEN:
            del self._open[min(self._open)]
        if any(len(held[tier]) < wanted for tier, wanted in self._wanted.items()):
            return False
        self._open = {other: copies for other, copies in self._open.items() if other > key}
        first = self.complete is None
        self.complete, self._newest = report.step, key
        return first

    def keeper_bytes(self, slots: int, replicas: int, keep: int) -> int:
        """What the keeper of a node with ``slots`` ranks holds at most."""
        held = most_held(keep) if replicas else keep
        return max(self._nbytes.values(), default=0) * slots * (1 + replicas) * held
