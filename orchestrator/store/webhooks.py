"""Rows of notifications that wait to be posted.

Promises: every function works inside the caller's transaction and begins none; a
notification is written with the transition that it tells.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import sqlalchemy as sa
from sqlalchemy.engine import Connection, RowMapping

from orchestrator.lifecycle import Cause, JobState
from orchestrator.spec.config import NotificationsConfig
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


def due_webhooks(db: Connection, now: float, limit: int = 20) -> list[RowMapping]:
    """Rows of those whose time has come, with their job's spec, oldest first."""
    query = (
        sa.select(webhooks, jobs.c.spec)
        .join(jobs, jobs.c.id == webhooks.c.job)
        .where(webhooks.c.due_at <= now)
        .order_by(webhooks.c.id)
        .limit(limit)
    )
    return list(db.execute(query).mappings())


def set_due(db: Connection, id_: int, due_at: float | None) -> None:
    """One more try was made; the next is at ``due_at``, or none is."""
    values = {"tries": webhooks.c.tries + 1, "due_at": due_at}
    db.execute(sa.update(webhooks).where(webhooks.c.id == id_).values(values))
