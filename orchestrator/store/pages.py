"""What the store has, a page at a time, and jobs by what people call them.

Promises: a page is bounded; its cursor stays right whatever is added meanwhile: what was there
when the first page was read is told once, in order. Jobs are ordered by when they were submitted,
records by when they were stored.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

import sqlalchemy as sa
from sqlalchemy.engine import RowMapping

from orchestrator.lifecycle import JobState
from orchestrator.store.controls import ControlRow, stored_controls
from orchestrator.store.engine import Reads
from orchestrator.store.rows import (
    JOB,
    JobRow,
    UnknownJobError,
    job_row,
    page_of,
    step_context,
    stored_job,
)
from orchestrator.store.tables import actions, contexts, incidents, jobs

_WORD = re.compile(r"[a-z0-9-]{1,80}")
"""What an id, a name or its beginning is made of."""
_AFTER_ALL = "{"
"""The next character after all of these."""

MOST_CANDIDATES = 50
"""Jobs looked at that a beginning could mean."""


class AmbiguousJobError(ValueError):
    """Several jobs go by this name."""

    def __init__(self, word: str, ids: Sequence[str]) -> None:
        super().__init__(word, list(ids))
        self.word, self.ids = word, list(ids)

    def __str__(self) -> str:
        listed = ", ".join(self.ids[:10]) + (", …" if len(self.ids) > 10 else "")
        return f"{self.word!r} could be {listed}"


class Pages:
    """Reads of one store; ``read`` opens a connection of it."""

    def __init__(self, read: Reads) -> None:
        self._read = read

    def jobs(
        self, after: str | None, limit: int, states: Sequence[JobState] = (), by: str | None = None
    ) -> list[JobRow]:
        """Jobs after the one with the id ``after``, oldest first; of ``states`` (all without) and
        submitted by ``by`` (anybody without). Raises ``UnknownJobError`` for a cursor of no job."""
        query = sa.select(*JOB).order_by(jobs.c.submitted_at, jobs.c.id).limit(limit)
        if states:
            query = query.where(jobs.c.state.in_([s.word for s in states]))
        if by is not None:
            query = query.where(jobs.c.submitted_by == by)
        with self._read() as db:
            if after is not None:
                at = stored_job(db, after)["submitted_at"]
                later = sa.and_(jobs.c.submitted_at == at, jobs.c.id > after)
                # The first alone is what an index finds the beginning by.
                query = query.where(jobs.c.submitted_at >= at)
                query = query.where(sa.or_(jobs.c.submitted_at > at, later))
            return [job_row(row) for row in db.execute(query).mappings()]

    def job(self, word: str) -> JobRow:
        """The job with this id, else this name, else this beginning of its id; of several the only
        one that hasn't ended. Raises ``UnknownJobError`` and ``AmbiguousJobError``."""
        found = self._meant(word) if _WORD.fullmatch(word) else []
        if not found:
            raise UnknownJobError(word)
        if len(found) > 1:
            raise AmbiguousJobError(word, [row["id"] for row in found])
        return job_row(found[0])

    def _meant(self, word: str) -> Sequence[RowMapping]:
        """Jobs that it could mean, the newest of them; one where it is clear."""
        ended = jobs.c.state.in_([s.word for s in JobState if s.terminal])
        begins = sa.func.substr(jobs.c.id, 1, len(word)) == word
        newest = sa.select(*JOB).order_by(jobs.c.submitted_at.desc(), jobs.c.id)
        newest = newest.limit(MOST_CANDIDATES)
        with self._read() as db:
            if db.dialect.name == "sqlite":
                # It compares byte by byte, so that an index finds them; others may not.
                begins = sa.and_(jobs.c.id >= word, jobs.c.id < word + _AFTER_ALL)
            for mine in (jobs.c.id == word, jobs.c.name == word, begins):
                found = db.execute(newest.where(mine)).mappings().all()
                if len(found) > 1:
                    going = db.execute(newest.where(mine, sa.not_(ended))).mappings().all()
                    found = going if len(going) == 1 else found
                if found:
                    return found
        return []

    def incidents(self, job: str, after: int, limit: int) -> list[tuple[int, dict[str, Any]]]:
        """(id, ``Incident.to_json()``) of those with an id above ``after``, oldest first."""
        return self._bodies(incidents, job, after, limit)

    def actions(self, job: str, after: int, limit: int) -> list[tuple[int, dict[str, Any]]]:
        """(id, ``Action.to_json()``) of those with an id above ``after``, oldest first."""
        return self._bodies(actions, job, after, limit)

    def contexts(self, job: str, after: int, limit: int) -> list[tuple[int, dict[str, Any]]]:
        """(id, ``StepContext.to_json()``) of those with an id above ``after``, oldest first."""
        with self._read() as db:
            rows = db.execute(page_of(contexts, job, after, limit)).mappings()
            return [(row["id"], step_context(row).to_json()) for row in rows]

    def controls(self, job: str, after: str | None, limit: int) -> list[ControlRow]:
        """What was asked of a job after the control of the key ``after``, oldest first. Raises
        ``UnknownControlError`` for a cursor of no control."""
        with self._read() as db:
            return stored_controls(db, job, after, limit)

    def _bodies(
        self, table: sa.Table, job: str, after: int, limit: int
    ) -> list[tuple[int, dict[str, Any]]]:
        with self._read() as db:
            rows = db.execute(page_of(table, job, after, limit)).mappings()
            return [(row["id"], json.loads(row["body"])) for row in rows]
