"""The rows of a batch: what a supervisor tells of its attempt, or the controller decides.

Promises: every function works inside the caller's transaction and begins none.
"""

from __future__ import annotations

import json
from typing import Any

import sqlalchemy as sa
from sqlalchemy.engine import Connection, RowMapping

from orchestrator.lifecycle import next_state, state_named
from orchestrator.protocol import SupervisorBatch
from orchestrator.store.controls import answer_controls
from orchestrator.store.rows import add_event, dump, step_columns
from orchestrator.store.tables import actions, contexts, detector_states, incidents, jobs, steps
from orchestrator.store.transitions import set_state


def store_batch(
    db: Connection, row: RowMapping, attempt: int, batch: SupervisorBatch, time: float
) -> None:
    """Write all that a batch tells, its transition last."""
    job = row["id"]
    place = {"job": job, "attempt": attempt}
    for event in batch.events:
        add_event(db, job, attempt, event)
    if batch.steps:
        db.execute(sa.insert(steps), [{**place, **step_columns(s)} for s in batch.steps])
    if batch.contexts:
        known = [
            {
                "job": job,
                "attempt": c.attempt,
                "timeline": c.timeline,
                "step": c.step,
                "held": ",".join(map(str, c.held)),
                "decides": int(c.decides),
                "ended": int(c.ended),
            }
            for c in batch.contexts
        ]
        db.execute(sa.insert(contexts), known)
    for table, records in (
        (incidents, [dict(i) for i in batch.incidents]),
        (actions, [a.to_json() for a in batch.actions]),
    ):
        for record in records:
            found = {k: record[k] for k in ("timeline", "step", "kind")}
            db.execute(sa.insert(table).values({**place, **found, "body": dump(record)}))
    changed: dict[str, Any] = {}
    if batch.steps:
        newest = batch.steps[-1]
        loss = float(newest["loss"])
        changed = {"step": newest["step"], "timeline": newest["timeline"], "goes_on_at": None}
        # Databases differ in what they do with NaN; the step's own body keeps it.
        changed["loss"] = loss if loss - loss == 0 else None
    # An action is stored before anything that it leads to.
    for back in (action for action in batch.actions if action.to_step is not None):
        changed["goes_on_at"] = back.to_step
    answer_controls(db, job, batch.answers, time)
    if batch.detector_state is not None:
        _set_detector_state(db, job, dump(dict(batch.detector_state)))
        changed["detector_state"] = None
    if changed:
        db.execute(sa.update(jobs).where(jobs.c.id == job).values(changed))
    if batch.transition:
        cause = batch.transition[1]
        after = next_state(state_named(row["state"]), cause)
        told = [e.message for e in batch.events] or [a.reason for a in batch.actions]
        reason = told[-1] if told else cause.value
        set_state(db, row, cause, after, reason, time, {}, brief=bool(batch.events))


def _set_detector_state(db: Connection, job: str, text: str) -> None:
    """Write what the detectors of a job have learnt, in place of what they had."""
    mine = detector_states.c.job == job
    replaced = db.execute(sa.update(detector_states).where(mine).values(body=text))
    if not replaced.rowcount:
        db.execute(sa.insert(detector_states).values(job=job, body=text))


def detector_state_of(db: Connection, job: str) -> Any:
    """What the detectors of a job had learnt; None where nothing is stored."""
    mine = sa.select(detector_states.c.body).where(detector_states.c.job == job)
    text = db.execute(mine).scalar_one_or_none()
    if text is None:
        # Of an older Octavo.
        column = sa.select(jobs.c.detector_state).where(jobs.c.id == job)
        text = db.execute(column).scalar_one_or_none()
    return json.loads(text) if text else None
