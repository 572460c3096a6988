"""The jobs that a pass of the controller looks at, read again only where something was written.

A controller with ten thousand jobs looks at all of them twice a second and moves a few. What it
saw is kept here, by job; whoever writes a job's row says so, and the next look reads those rows
alone. Promises: a look sees everything that was committed before it; the store is the only writer
of its database, and one that is opened anew reads everything once; a read that fails loses nothing.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from operator import attrgetter

import sqlalchemy as sa

from orchestrator.lifecycle import JobState
from orchestrator.store.engine import Reads
from orchestrator.store.rows import JOB, JobRow, job_row
from orchestrator.store.tables import jobs

MOST_IDS = 500
"""In one statement: databases bound its parameters."""

_AGE = attrgetter("submitted_at", "id")
_MOVING = [s.word for s in JobState if not s.terminal and s is not JobState.PAUSED]


class TendedJobs:
    """Jobs on their way, and those that hold nodes after their end."""

    def __init__(self, read: Reads) -> None:
        self._read = read
        self._looking = threading.Lock()
        self._marking = threading.Lock()
        self._rows: dict[str, JobRow] | None = None
        """None: never read."""
        self._written: set[str] = set()
        self._seated: dict[str, JobRow] = {}
        """Those with nodes."""
        self._version = 0

    def written(self, *job: str) -> None:
        """Their rows were committed."""
        with self._marking:
            self._written.update(job)

    def all(self) -> tuple[list[JobRow], int]:
        """Oldest first; and a number that is another one once something has changed of them that
        placement depends on."""
        with self._looking:
            return sorted(self._now().values(), key=_AGE), self._version

    def seated(self) -> list[JobRow]:
        """Those that hold nodes, oldest first."""
        with self._looking:
            self._now()
            return sorted(self._seated.values(), key=_AGE)

    def _now(self) -> Mapping[str, JobRow]:
        with self._marking:
            written, self._written = self._written, set()
        try:
            if self._rows is None:
                self._rows = {row.id: row for row in self._query(_to_tend())}
                self._seated = {row.id: row for row in self._rows.values() if row.nodes}
                self._version += 1
            elif written:
                self._again(self._rows, sorted(written))
        except BaseException:
            with self._marking:
                self._written |= written
            raise
        return self._rows

    def _again(self, rows: dict[str, JobRow], written: Sequence[str]) -> None:
        found: dict[str, JobRow] = {}
        for first in range(0, len(written), MOST_IDS):
            ids = jobs.c.id.in_(written[first : first + MOST_IDS])
            found |= {row.id: row for row in self._query(sa.and_(ids, _to_tend()))}
        news = False
        for job in written:
            before, now = rows.pop(job, None), found.get(job)
            self._seated.pop(job, None)
            news |= _for_placement(before) != _for_placement(now)
            if now is None:
                continue
            if before is not None:
                now.take_over(before)
            rows[job] = now
            if now.nodes:
                self._seated[job] = now
        self._version += news

    def _query(self, which: sa.ColumnElement[bool]) -> list[JobRow]:
        with self._read() as db:
            return [job_row(row) for row in db.execute(sa.select(*JOB).where(which)).mappings()]


def _to_tend() -> sa.ColumnElement[bool]:
    return sa.or_(jobs.c.state.in_(_MOVING), jobs.c.placement_group != "")


def _for_placement(row: JobRow | None) -> object:
    """All of a row that decides who is given nodes."""
    if row is None:
        return None
    return (row.state, row.placement_group, row.nodes, row.attempt, row.granted_at, row.spec_text)
