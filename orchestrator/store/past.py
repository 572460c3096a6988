"""A job's past, read back: its events, steps, incidents, actions and contexts.

Promises: records come oldest first, in the order they were stored; nothing is lost of one on the
way there and back; whatever is asked for in pages joins without a gap or an overlap; what a page
takes doesn't grow with the job.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from monitoring.records import Incident
from orchestrator.actions import Action
from orchestrator.protocol import JobHistory, PastMark, StepContext
from orchestrator.saved.closing import LIGHT_RECORDS
from orchestrator.store.engine import Reads
from orchestrator.store.rows import light_record, page_of, step_context, step_record
from orchestrator.store.tables import actions, contexts, events, incidents, steps

HISTORY_PAGE = 1000
"""Rows of each kind that a page of a job's history has at most."""


class PastRecords:
    """What a store has of the past of its jobs; ``reading`` opens a connection of it."""

    def __init__(self, reading: Reads) -> None:
        self._reading = reading

    def events(self, job: str, after: int = 0, limit: int = 500) -> list[dict[str, Any]]:
        """Events with an id above ``after``, oldest first."""
        with self._reading() as db:
            rows = db.execute(page_of(events, job, after, limit)).mappings()
            return [{**row, "detail": json.loads(row["detail"])} for row in rows]

    def events_of_attempt(self, job: str, attempt: int, kind: str) -> list[dict[str, Any]]:
        """Events of a kind that an attempt told, oldest first."""
        query = page_of(events, job, 0, None)
        query = query.where(events.c.attempt == attempt, events.c.kind == kind)
        with self._reading() as db:
            rows = db.execute(query).mappings()
            return [{**row, "detail": json.loads(row["detail"])} for row in rows]

    def newest(self, job: str) -> tuple[int, int]:
        """The ``id`` of the newest event and of the newest incident; 0 where there is none."""
        with self._reading() as db:
            last = [
                db.execute(sa.select(sa.func.max(of.c.id)).where(of.c.job == job)).scalar_one()
                for of in (events, incidents)
            ]
        return last[0] or 0, last[1] or 0

    def newest_event(self, job: str, kinds: Sequence[str]) -> dict[str, Any] | None:
        """The last event of any of ``kinds``; None where there is none."""
        return next(iter(self.newest_events(job, kinds, 1)), None)

    def newest_events(self, job: str, kinds: Sequence[str], count: int) -> list[dict[str, Any]]:
        """The last ``count`` of any of ``kinds``, oldest first."""
        newest = (
            sa.select(events)
            .where(events.c.job == job, events.c.kind.in_(kinds))
            .order_by(events.c.id.desc())
            .limit(count)
        )
        with self._reading() as db:
            rows = db.execute(newest).mappings().all()
            return [{**row, "detail": json.loads(row["detail"])} for row in reversed(rows)]

    def newest_steps(self, job: str, count: int) -> list[dict[str, Any]]:
        """The last ``count`` of them, oldest first."""
        newest = sa.select(steps).where(steps.c.job == job).order_by(steps.c.id.desc())
        with self._reading() as db:
            rows = db.execute(newest.limit(count)).mappings().all()
            return [step_record(row) for row in reversed(rows)]

    def steps(self, job: str, after: int = 0, limit: int = 500) -> list[dict[str, Any]]:
        """``StepRecord.to_json()`` with an ``id``, in the order they were stored."""
        with self._reading() as db:
            rows = db.execute(page_of(steps, job, after, limit)).mappings()
            return [{"id": row["id"], **step_record(row)} for row in rows]

    def newest_step(self, job: str) -> int:
        """The ``id`` of the newest step record; 0 where there is none."""
        newest = sa.select(sa.func.max(steps.c.id)).where(steps.c.job == job)
        with self._reading() as db:
            return db.execute(newest).scalar_one() or 0

    def incidents(self, job: str, attempt: int | None = None) -> list[Incident]:
        """All incidents of a job, or of one attempt of it, oldest first."""
        query = page_of(incidents, job, 0, None)
        if attempt is not None:
            query = query.where(incidents.c.attempt == attempt)
        with self._reading() as db:
            rows = db.execute(query).mappings()
            return [Incident.from_json(json.loads(row["body"])) for row in rows]

    def actions(self, job: str) -> list[Action]:
        """All actions of a job, oldest first."""
        with self._reading() as db:
            rows = db.execute(page_of(actions, job, 0, None)).mappings()
            return [Action.from_json(json.loads(row["body"])) for row in rows]

    def contexts(self, job: str) -> list[StepContext]:
        """What supervisors knew beside step records, where it was unusual; oldest first."""
        with self._reading() as db:
            rows = db.execute(page_of(contexts, job, 0, None)).mappings()
            return [step_context(row) for row in rows]

    def history(
        self,
        job: str,
        after: PastMark | None = None,
        *,
        newest: int = LIGHT_RECORDS,
        page: int = HISTORY_PAGE,
    ) -> JobHistory:
        """A page of a job's past, from ``after`` on: of its steps the ``newest`` alone, without
        their tensors' statistics."""
        with self._reading() as db:
            at = after or PastMark(_last_left_out(db, job, newest), 0, 0)
            light = (steps.c.id, steps.c.body)
            done = db.execute(page_of(steps, job, at.step, page, *light)).mappings().all()
            seen = db.execute(page_of(incidents, job, at.incident, page)).mappings().all()
            told = db.execute(page_of(events, job, at.event, page)).mappings().all()
        read = PastMark(
            done[-1]["id"] if done else at.step,
            seen[-1]["id"] if seen else at.incident,
            told[-1]["id"] if told else at.event,
        )
        fields = ("kind", "time", "message")
        return JobHistory(
            steps=tuple(light_record(row) for row in done),
            incidents=tuple(json.loads(row["body"]) for row in seen),
            events=tuple(
                {**{k: row[k] for k in fields}, "detail": json.loads(row["detail"])} for row in told
            ),
            goes_on=read if page in (len(done), len(seen), len(told)) else None,
        )


def _last_left_out(db: Connection, job: str, newest: int) -> int:
    """The ``id`` of the step before the ``newest`` of them; 0 where there is none."""
    before = sa.select(steps.c.id).where(steps.c.job == job).order_by(steps.c.id.desc())
    return db.execute(before.offset(newest).limit(1)).scalar_one_or_none() or 0
