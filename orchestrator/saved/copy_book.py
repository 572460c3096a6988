"""Which steps are held outside the ranks, on their own nodes and on partners. Pure."""

from __future__ import annotations

from collections import Counter

from launch.commands import SnapshotReport
from launch.keeper import most_held

MOST_OPEN = 64
"""Steps that some ranks have copies of and others not yet; older ones are given up."""


class CopyBook:
    """The copies of one attempt's ranks in keepers."""

    def __init__(self, world_size: int, replicas: int) -> None:
        self._wanted = {"memory": world_size, "partner": world_size * replicas}
        self._open: dict[tuple[int, int], Counter[str]] = {}
        self._nbytes: dict[int, int] = {}
        self.complete: int | None = None
        """Newest step that every rank's keeper, and its partners', hold; None: none yet."""

    def add(self, report: SnapshotReport) -> bool:
        """Count a copy; True when it completes the attempt's first step that is held by all."""
        key = (report.timeline, report.step)
        counted = self._open.setdefault(key, Counter())
        counted[report.tier] += 1
        self._nbytes[report.rank] = report.nbytes
        while len(self._open) > MOST_OPEN:
            del self._open[min(self._open)]
        if any(counted[tier] < wanted for tier, wanted in self._wanted.items()):
            return False
        self._open.pop(key, None)
        first = self.complete is None
        self.complete = report.step
        return first

    def keeper_bytes(self, slots: int, replicas: int, keep: int) -> int:
        """What the keeper of a node with ``slots`` ranks holds at most."""
        held = most_held(keep) if replicas else keep
        return max(self._nbytes.values(), default=0) * slots * (1 + replicas) * held
