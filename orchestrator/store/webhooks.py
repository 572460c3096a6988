"""Notifications that wait to be posted.

Promises: one is written with the transition that it tells, in the caller's transaction; it stays
due until it is settled, which an event of its job tells.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import sqlalchemy as sa
from sqlalchemy.engine import Connection, RowMapping

from orchestrator.events import EventDraft
from orchestrator.lifecycle import Cause, JobState
from orchestrator.spec.config import NotificationsConfig
from orchestrator.store.engine import Reads, Writes
from orchestrator.store.rows import add_event, stored_job, stored_spec
from orchestrator.store.tables import jobs, webhooks

VERSION = 1
"""Of the body; a field may be added, none changes its meaning within a version."""


@dataclass(frozen=True, slots=True)
class Delivery:
    """One notification to be posted."""

    id: int
    job: str
    body: Mapping[str, Any]
    tries: int
    config: NotificationsConfig


def add_webhook(
    db: Connection,
    job: RowMapping,
    config: NotificationsConfig,
    state: JobState,
    cause: Cause,
    reason: str,
    time: float,
    step: int,
) -> None:
    """Note that ``job`` came to ``state`` at ``step``, where its spec wants that told."""
    if not config.wanted(state.word):
        return
    body = {
        "version": VERSION,
        "job": job["id"],
        "name": job["name"],
        "state": state.word,
        "cause": cause.value,
        "reason": reason,
        "step": step,
        # As `octavo status` counts: the first step has number 0.
        "steps_done": step + 1,
        "attempt": job["attempt"],
        "time": time,
        "job_dir": job["job_dir"],
    }
    row = {"job": job["id"], "body": json.dumps(body), "tries": 0, "due_at": time}
    db.execute(sa.insert(webhooks).values(row))


class WebhookRecords:
    """The notifications of a store; ``writing`` and ``reading`` are its transactions."""

    def __init__(self, writing: Writes, reading: Reads) -> None:
        self._writing = writing
        self._reading = reading

    def due(self, now: float, most_s: float) -> list[Delivery]:
        """Notifications whose time has come, oldest first; those too that should wait for longer
        than ``most_s``, for they are of a clock that was mended since."""
        with self._reading() as db:
            return [
                Delivery(
                    row["id"],
                    row["job"],
                    json.loads(row["body"]),
                    row["tries"],
                    stored_spec(row["spec"]).notifications,
                )
                for row in _due(db, now, most_s)
            ]

    def postpone(self, delivery: Delivery, due_at: float) -> None:
        """It did not arrive; the next try is at ``due_at``."""
        with self._writing() as db:
            _set_due(db, delivery.id, due_at)

    def settle(self, delivery: Delivery, event: EventDraft) -> None:
        """It arrived or is given up, which ``event`` tells."""
        with self._writing() as db:
            _set_due(db, delivery.id, None)
            add_event(db, delivery.job, stored_job(db, delivery.job)["attempt"], event)


def _due(db: Connection, now: float, most_s: float, limit: int = 20) -> list[RowMapping]:
    """Rows of those whose time has come, with their job's spec, oldest first."""
    query = (
        sa.select(webhooks, jobs.c.spec)
        .join(jobs, jobs.c.id == webhooks.c.job)
        .where(sa.or_(webhooks.c.due_at <= now, webhooks.c.due_at > now + most_s))
        .order_by(webhooks.c.id)
        .limit(limit)
    )
    return list(db.execute(query).mappings())


def _set_due(db: Connection, id_: int, due_at: float | None) -> None:
    """One more try was made; the next is at ``due_at``, or none is."""
    values = {"tries": webhooks.c.tries + 1, "due_at": due_at}
    db.execute(sa.update(webhooks).where(webhooks.c.id == id_).values(values))
