"""What a scrape of ``/metrics`` reads: counts and newest records, in a few queries.

Promises: the work grows with the jobs that are under way, not with those that ever were or with
the steps that they have done.
"""

from __future__ import annotations

import json
from collections import defaultdict
from typing import Any

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from monitoring.prometheus import JobNumbers, Numbers
from monitoring.records import StepRecord
from orchestrator.lifecycle import JobState
from orchestrator.store.rows import JOB, JobRow, job_row
from orchestrator.store.tables import actions, incidents, jobs, quarantines, steps

AFTERWARDS_S = 3600.0
"""Seconds that a job's numbers are told after its end, so that the last ones are scraped."""


def numbers(db: Connection, now: float) -> Numbers:
    """Everything at one moment."""
    going = [state.word for state in JobState if not state.terminal]
    told = jobs.c.state.in_(going) | (jobs.c.ended_at > now - AFTERWARDS_S)
    rows = [job_row(row) for row in db.execute(sa.select(*JOB).where(told)).mappings()]
    ids = sa.select(jobs.c.id).where(told)
    seen, done = _counts(db, incidents, ids), _counts(db, actions, ids)
    newest = _newest(db, ids)
    by_state = sa.select(jobs.c.state, sa.func.count()).group_by(jobs.c.state)
    counted = {str(state): int(count) for state, count in db.execute(by_state)}
    held = sa.select(sa.func.count(sa.distinct(quarantines.c.node_id))).where(
        quarantines.c.released_at.is_(None),
        quarantines.c.until.is_(None) | (quarantines.c.until > now),
    )
    return Numbers(
        jobs=[_job(row, newest.get(row.id), seen[row.id], done[row.id]) for row in rows],
        states={state.word: counted.get(state.word, 0) for state in JobState},
        quarantined_nodes=db.execute(held).scalar_one(),
    )


def _job(
    row: JobRow, newest: StepRecord | None, seen: dict[str, int], done: dict[str, int]
) -> JobNumbers:
    return JobNumbers(
        job=row.id,
        name=row.name,
        steps_planned=row.planned_steps,
        attempt=row.attempt,
        nodes=len(row.nodes),
        fp8_format=row.fp8_format,
        newest=newest,
        steps_done=row.stands_at + 1,
        incidents=seen,
        actions=done,
    )


def _counts(db: Connection, table: sa.Table, ids: sa.Select[Any]) -> dict[str, dict[str, int]]:
    counts: dict[str, dict[str, int]] = defaultdict(dict)
    query = sa.select(table.c.job, table.c.kind, sa.func.count()).where(table.c.job.in_(ids))
    for job, kind, count in db.execute(query.group_by(table.c.job, table.c.kind)):
        counts[job][kind] = count
    return counts


def _newest(db: Connection, ids: sa.Select[Any]) -> dict[str, StepRecord]:
    newest = sa.select(sa.func.max(steps.c.id)).where(steps.c.job.in_(ids)).group_by(steps.c.job)
    query = sa.select(steps.c.job, steps.c.body).where(steps.c.id.in_(newest))
    return {job: StepRecord.from_json(json.loads(body)) for job, body in db.execute(query)}
