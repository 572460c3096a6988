"""What a scrape of ``/metrics`` reads: counts and newest records, in a few queries.

Promises: the work grows with the jobs that are under way, not with those that ever were or with
the steps that they have done.
"""

from __future__ import annotations

import json
from collections import defaultdict
from dataclasses import replace
from typing import Any

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from monitoring.prometheus import JobNumbers, Numbers
from monitoring.records import StepRecord
from orchestrator.lifecycle import JobState
from orchestrator.node_slot import homes
from orchestrator.planning.utilization import rank_peak_tokens_per_s
from orchestrator.store.rows import JOB, JobRow, job_row, step_record
from orchestrator.store.tables import actions, events, incidents, jobs, quarantines, steps

AFTERWARDS_S = 3600.0
"""Seconds that a job's numbers are told after its end, so that the last ones are scraped."""


def numbers(db: Connection, now: float) -> Numbers:
    """Everything at one moment."""
    going = [state.word for state in JobState if not state.terminal]
    told = jobs.c.state.in_(going) | (jobs.c.ended_at > now - AFTERWARDS_S)
    rows = [job_row(row) for row in db.execute(sa.select(*JOB).where(told)).mappings()]
    ids = sa.select(jobs.c.id).where(told)
    seen, done = _counts(db, incidents, ids), _counts(db, actions, ids)
    newest, lived = _newest(db, ids), _lived(db, ids)
    by_state = sa.select(jobs.c.state, sa.func.count()).group_by(jobs.c.state)
    counted = {str(state): int(count) for state, count in db.execute(by_state)}
    held = sa.select(sa.func.count(sa.distinct(quarantines.c.node_id))).where(
        quarantines.c.released_at.is_(None),
        quarantines.c.until.is_(None) | (quarantines.c.until > now),
    )
    return Numbers(
        jobs=[
            replace(_job(row, newest.get(row.id), seen[row.id], done[row.id]), **lived[row.id])
            for row in rows
        ],
        states={state.word: counted.get(state.word, 0) for state in JobState},
        quarantined_nodes=db.execute(held).scalar_one(),
    )


def _job(
    row: JobRow, newest: StepRecord | None, seen: dict[str, int], done: dict[str, int]
) -> JobNumbers:
    # Of the many that name no device nothing is parsed.
    named = newest is not None and '"device":' in row.spec_text
    peak = rank_peak_tokens_per_s(row.spec) if named else None
    ranks = len(homes(row.nodes))
    return JobNumbers(
        job=row.id,
        name=row.name,
        steps_planned=row.planned_steps,
        attempt=row.attempt,
        nodes=len(row.nodes),
        submitted_at=row.submitted_at,
        started_at=row.started_at,
        fp8_format=row.fp8_format,
        newest=newest,
        peak_tokens_per_s=None if peak is None else peak * ranks,
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


def _lived(db: Connection, ids: sa.Select[Any]) -> dict[str, dict[str, Any]]:
    """What events tell of each job's life."""
    found: dict[str, dict[str, Any]] = defaultdict(dict)
    mine = events.c.job.in_(ids)
    written = sa.select(events.c.job, sa.func.max(events.c.time)).where(
        mine, events.c.kind == "checkpoint_written"
    )
    for job, at in db.execute(written.group_by(events.c.job)):
        found[job]["checkpoint_at"] = at
    recovered = sa.select(events.c.job, events.c.detail).where(mine, events.c.kind == "recovered")
    for job, body in db.execute(recovered):
        own, detail = found[job], json.loads(body)
        own["steps_lost"] = own.get("steps_lost", 0) + int(detail.get("steps_lost", 0))
        seconds = float(detail.get("time_to_recover_s", 0.0))
        own["recovering_s"] = own.get("recovering_s", 0.0) + seconds
    # What a person is left with has no recovery, or a later one that counts its own.
    left = sa.select(actions.c.job, actions.c.step, actions.c.body).where(
        actions.c.job.in_(ids), actions.c.kind.in_(("pause", "fail"))
    )
    for job, step, body in db.execute(left):
        to_step = json.loads(body).get("to_step")
        if to_step is not None:
            lost = max(0, int(step) + 1 - int(to_step))
            found[job]["steps_lost"] = found[job].get("steps_lost", 0) + lost
    return found


def _newest(db: Connection, ids: sa.Select[Any]) -> dict[str, StepRecord]:
    newest = sa.select(sa.func.max(steps.c.id)).where(steps.c.job.in_(ids)).group_by(steps.c.job)
    query = sa.select(steps.c.job, steps.c.body, steps.c.tensors).where(steps.c.id.in_(newest))
    rows = db.execute(query).mappings()
    return {row["job"]: StepRecord.from_json(step_record(row)) for row in rows}
