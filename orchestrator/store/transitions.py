"""A job's way from state to state, as rows: with its event, its notification and its answers.

Promises: every function works inside the caller's transaction and begins none; what a transition
brings with it is written with it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import sqlalchemy as sa
from sqlalchemy.engine import Connection, RowMapping

from orchestrator.events import EventDraft
from orchestrator.lifecycle import Cause, JobState, TransitionRefused, next_state
from orchestrator.recovery.controls import Control, answered
from orchestrator.store.controls import answer_the_rest, open_controls
from orchestrator.store.rows import add_event, stands_at, stored_job, stored_spec
from orchestrator.store.tables import jobs
from orchestrator.store.webhooks import add_webhook


def set_state(
    db: Connection,
    row: RowMapping,
    cause: Cause,
    after: JobState,
    reason: str,
    time: float,
    detail: Mapping[str, Any],
    *,
    brief: bool = False,
) -> None:
    """Write a transition that the table allows, with its event; none if nothing changes.

    ``brief``: another event has told the reason; this one says the cause only.
    """
    if row["state"] == after.word:
        return
    values: dict[str, Any] = {"state": after.word, "reason": reason}
    if after is JobState.STARTING and row["started_at"] is None:
        values["started_at"] = time
    if after.terminal:
        values["ended_at"] = time
    db.execute(sa.update(jobs).where(jobs.c.id == row["id"]).values(values))
    told = {"from": row["state"], "to": after.word, "cause": cause.value, **detail}
    message = f"{after.word}: {cause.value if brief or not reason else reason}"
    add_event(db, row["id"], row["attempt"], EventDraft("state", time, message, told))
    if after.terminal or after is JobState.PAUSED or cause is Cause.PREEMPTED:
        now_stored = stored_job(db, row["id"])
        if cause is Cause.PREEMPTED and (asked := _pause_asked(db, row["id"])) is not None:
            # The job that a person stops doesn't start again because a queue stopped it too.
            why = f"paused by {asked.by} as it went back into the queue"
            set_state(db, now_stored, Cause.PAUSE_ASKED, JobState.PAUSED, why, time, {})
            return
        if cause is not Cause.PREEMPTED:
            config = stored_spec(row["spec"]).notifications
            standing = stands_at(now_stored["step"], now_stored["goes_on_at"])
            add_webhook(db, now_stored, config, after, cause, reason, time, standing)
        step = now_stored["step"]
        for control, answer in answer_the_rest(db, row["id"], after, step, reason, time):
            notice = answered(control, answer)
            draft = EventDraft(notice.kind, time, notice.message, notice.detail)
            add_event(db, row["id"], row["attempt"], draft)


def _pause_asked(db: Connection, job: str) -> Control | None:
    """The pause that a person asked for and that has no answer yet."""
    return next((r.control for r in open_controls(db, job) if r.control.kind == "pause"), None)


def transition_refusal(state: JobState, transition: tuple[JobState, Cause] | None) -> str:
    """Why the supervisor's transition can't be, or an empty string."""
    if transition is None:
        return ""
    wanted, cause = transition
    try:
        after = next_state(state, cause)
    except TransitionRefused as refused:
        return str(refused)
    # A supervisor that hasn't heard of the cancellation means well: the table decides.
    if after is not wanted and state is not JobState.CANCELLING:
        return str(TransitionRefused(state, cause, wanted))
    return ""
