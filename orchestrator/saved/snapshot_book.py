"""Which steps all ranks can go back to, and which of them are certified. Pure.

Promises: mirrors what the ranks' rings hold, from their reports; a step counts once every
rank has reported its copy, and is certified once ``certify_after`` healthy steps followed
it. A copy that a rank may have overwritten by now is not offered: a ring makes room before the
copy that it makes room for is reported, so that all but one of ``keep`` are. Where reports take
longer than the interval of snapshots, or a disk held on to copies for a whole round, one may be
offered that is gone; the next attempt then takes it from outside the ranks, and no budget is
charged (``orchestrator.recovery.last_steps``).
"""

from __future__ import annotations

from launch.commands import SnapshotReport
from launch.config import SnapshotConfig
from orchestrator.actions import Restorable


class SnapshotBook:
    """The in-memory snapshots of one attempt's ranks."""

    def __init__(self, config: SnapshotConfig, attempt: int, world_size: int) -> None:
        self._keep = config.keep
        self._certify_after = config.certify_after
        self._attempt = attempt
        self._world_size = world_size
        self._ranks: dict[tuple[int, int], set[int]] = {}
        self._held: dict[int, Restorable] = {}
        self._news: list[int] = []
        self._healthy_since = 0
        self._newest = -1

    def add(self, report: SnapshotReport, timeline: int) -> None:
        """Count a rank's copy; one of another attempt or timeline is refused."""
        if report.tier != "ring" or (report.attempt, report.timeline) != (self._attempt, timeline):
            return
        key = (report.timeline, report.step)
        ranks = self._ranks.setdefault(key, set())
        ranks.add(report.rank)
        if len(ranks) == self._world_size:
            del self._ranks[key]
            self._held[report.step] = Restorable(report.step, report.timeline, False)
            self._news.append(report.step)
            self._drop_oldest()
            self._certify()

    def made_smaller(self, kept: int) -> bool:
        """The ranks' rings hold ``kept`` snapshots, for want of room for ``keep``; False: that was
        known."""
        news, self._keep = kept < self._keep, kept
        self._drop_oldest()
        return news

    def news(self) -> tuple[int, ...]:
        """Steps whose copies have become complete since this was last asked, in that order."""
        told, self._news = tuple(self._news), []
        return told

    def healthy(self, step: int) -> None:
        """``step`` was recorded without an incident."""
        self._newest = step
        self._certify()

    def unhealthy(self, step: int) -> None:
        """``step`` was recorded with an incident: certification counts from after it."""
        self._newest = step
        self._healthy_since = step + 1

    def rolled_back(self, to_step: int) -> None:
        """The ranks drop what is newer than ``to_step``."""
        self._held = {step: held for step, held in self._held.items() if step <= to_step}
        self._ranks.clear()
        self._news = [step for step in self._news if step <= to_step]
        self._healthy_since = to_step
        self._newest = to_step - 1

    def restorable(self) -> tuple[Restorable, ...]:
        """Oldest first."""
        return tuple(self._held[step] for step in sorted(self._held))

    def _drop_oldest(self) -> None:
        # Ranks are at the same step, so that no ring has more than one copy beyond the newest.
        for old in sorted(self._held)[: -(self._keep - 1)]:
            del self._held[old]

    def _certify(self) -> None:
        for step, held in self._held.items():
            followed = self._newest + 1 - max(step, self._healthy_since)
            if not held.certified and followed >= self._certify_after:
                self._held[step] = Restorable(step, held.timeline, True)
