"""Copies that ranks could not make, or could not start from, as few events. No I/O; time is an
argument.

A keeper, a node or a storage that is gone is told by each rank that has to do with it, a thousand
of them in a large job. Promises: what several ranks tell of their copies of one step in one place
is told together, once all ranks have told it or ``GATHER_S`` after the first did; every rank is
named, and errors that differ in numbers alone count as one.
"""

from __future__ import annotations

import re
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field

from launch.commands import CopyFailed, CopyRefused

GATHER_S = 1.0
"""Seconds that ranks have to tell the same: longer than their reports are under way."""


@dataclass(frozen=True, slots=True)
class CopyTrouble:
    """What became of some ranks' copies of one step in one place."""

    first: CopyFailed | CopyRefused
    """The report that came first; the others differ in rank and error."""
    since: float
    """When it came."""
    by_error: dict[str, tuple[str, set[int]]] = field(default_factory=dict)
    """By what is alike in them: the first such error, and the ranks that have it."""

    @property
    def ranks(self) -> Sequence[int]:
        """All of them, in order."""
        return sorted({rank for _, ranks in self.by_error.values() for rank in ranks})

    def errors(self) -> list[tuple[str, Sequence[int]]]:
        """Each kind of error with its ranks, the most frequent first."""
        found = [(error, sorted(ranks)) for error, ranks in self.by_error.values()]
        return sorted(found, key=lambda told: -len(told[1]))


class CopyTroubles:
    """Of one job."""

    def __init__(self) -> None:
        self._open: dict[Hashable, CopyTrouble] = {}

    def add(self, report: CopyFailed | CopyRefused, now: float) -> None:
        """A rank tells one."""
        older = isinstance(report, CopyRefused) and report.point is not None
        place = (report.attempt, report.timeline, report.step, report.tier)
        trouble = self._open.setdefault((type(report), older, place), CopyTrouble(report, now))
        _, ranks = trouble.by_error.setdefault(_alike(report.error), (report.error, set()))
        ranks.add(report.rank)

    def due(self, now: float, world: int) -> list[CopyTrouble]:
        """Those to be told now, of ``world`` ranks."""
        whole = [
            key
            for key, trouble in self._open.items()
            if now - trouble.since >= GATHER_S or len(trouble.ranks) >= world
        ]
        return [self._open.pop(key) for key in whole]

    def rest(self) -> list[CopyTrouble]:
        """All that is left: nobody will tell more of it."""
        left, self._open = list(self._open.values()), {}
        return left


def _alike(error: str) -> str:
    """Without what has a number in it: a path, an address, a digest."""
    return re.sub(r"\S*\d\S*", "#", error)
