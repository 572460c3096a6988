"""Rows of what people asked of jobs, and what became of it.

Promises: every function works inside the caller's transaction and begins none; a control
is answered once; one that is under way when its job comes to rest is answered with it, in
the same transaction, so none stays open.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import sqlalchemy as sa
from sqlalchemy.engine import Connection, RowMapping

from orchestrator.actions import Action
from orchestrator.lifecycle import JobState
from orchestrator.recovery.controls import Control, ControlAnswer, ControlState, left_unanswered
from orchestrator.store.tables import actions, controls


class ControlConflictError(ValueError):
    """The key was used for another order."""

    def __init__(self, key: str) -> None:
        super().__init__(key)
        self.key = key

    def __str__(self) -> str:
        return f"the key {self.key!r} was used to ask for something else: take a new one"


class UnknownControlError(KeyError):
    """Nothing was asked of the job under this key."""

    def __str__(self) -> str:
        return f"nothing was asked of {self.args[0]} under the key {self.args[1]!r}"


class ControlRefusedError(ValueError):
    """It can't be done, which is known at once; its text says why."""


@dataclass(frozen=True, slots=True)
class ControlRow:
    """A control as stored."""

    job: str
    control: Control
    state: ControlState
    message: str
    step: int | None
    answered_at: float | None

    def to_json(self) -> dict[str, Any]:
        return {
            "job": self.job,
            **self.control.to_json(),
            "state": self.state,
            "message": self.message,
            "step": self.step,
            "answered_at": self.answered_at,
        }


def add_control(db: Connection, job: str, control: Control, message: str = "") -> None:
    """Write an accepted control; ``message``: what it waits for."""
    row = {"job": job, "key": control.key, "state": "accepted"}
    body = json.dumps(control.to_json(), separators=(",", ":"))
    db.execute(sa.insert(controls).values({**row, "body": body, "message": message}))


def stored_control(db: Connection, job: str, key: str) -> ControlRow | None:
    """The control of that key, if there is one."""
    mine = sa.and_(controls.c.job == job, controls.c.key == key)
    row = db.execute(sa.select(controls).where(mine)).mappings().one_or_none()
    return None if row is None else _control_row(row)


def stored_controls(
    db: Connection, job: str, after: str | None = None, limit: int | None = None
) -> list[ControlRow]:
    """Those of a job, oldest first: all, or ``limit`` after the one with the key ``after``, for
    which ``UnknownControlError`` is raised where there is none."""
    query = sa.select(controls).where(controls.c.job == job).order_by(controls.c.id)
    if after is not None:
        key = sa.and_(controls.c.job == job, controls.c.key == after)
        at = db.execute(sa.select(controls.c.id).where(key)).scalar_one_or_none()
        if at is None:
            raise UnknownControlError(job, after)
        query = query.where(controls.c.id > at)
    if limit is not None:
        query = query.limit(limit)
    return [_control_row(row) for row in db.execute(query).mappings()]


def open_controls(db: Connection, job: str | None = None) -> list[ControlRow]:
    """Those without an answer, oldest first; of all jobs unless one is named."""
    query = sa.select(controls).where(controls.c.state == "accepted").order_by(controls.c.id)
    if job is not None:
        query = query.where(controls.c.job == job)
    return [_control_row(row) for row in db.execute(query).mappings()]


def answer_controls(
    db: Connection, job: str, answers: Sequence[ControlAnswer], time: float
) -> None:
    """Write answers; a control that has one keeps it."""
    for answer in answers:
        mine = sa.and_(
            controls.c.job == job,
            controls.c.key == answer.key,
            controls.c.state == "accepted",
        )
        values = {
            "state": answer.state,
            "message": answer.message,
            "step": answer.step,
            "answered_at": time,
        }
        db.execute(sa.update(controls).where(mine).values(values))


def answer_the_rest(
    db: Connection, job: str, state: JobState, step: int, reason: str, time: float
) -> list[tuple[Control, ControlAnswer]]:
    """The job came to rest in ``state``: answer what is still open, and say so."""
    left = [row.control for row in open_controls(db, job)]
    decided = _decided(db, job) if left else {}
    pairs = [
        (control, left_unanswered(control, state, step, reason, decided.get(control.key)))
        for control in left
    ]
    answer_controls(db, job, [answer for _, answer in pairs], time)
    return pairs


def _decided(db: Connection, job: str) -> dict[str, Action]:
    """What was decided on controls, by their keys."""
    query = sa.select(actions.c.body).where(actions.c.job == job)
    found = [Action.from_json(json.loads(body)) for body in db.execute(query).scalars()]
    return {action.asked.key: action for action in found if action.asked is not None}


def _control_row(row: RowMapping) -> ControlRow:
    control = Control.from_json(json.loads(row["body"]))
    state: ControlState = row["state"]
    return ControlRow(row["job"], control, state, row["message"], row["step"], row["answered_at"])
