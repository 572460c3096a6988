"""Rows of the store's tables: what they mean, and the statements that write one.

Promises: every function works inside the caller's transaction and begins none.
"""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import sqlalchemy as sa
from sqlalchemy.engine import Connection, RowMapping

from orchestrator.events import EventDraft
from orchestrator.lifecycle import Cause, JobState, TransitionRefused, next_state, state_named
from orchestrator.node_slot import NodeSlot
from orchestrator.placement.asks import Asks, asks_of
from orchestrator.placement.fair_queue import Ticket
from orchestrator.protocol import StepContext, SupervisorBatch
from orchestrator.recovery.controls import answered
from orchestrator.spec.job import JobSpec
from orchestrator.store.controls import answer_controls, answer_the_rest
from orchestrator.store.tables import (
    actions,
    attempts,
    contexts,
    detector_states,
    events,
    incidents,
    jobs,
    steps,
)
from orchestrator.store.webhooks import add_webhook


class UnknownJobError(KeyError):
    """No job has this id."""

    def __str__(self) -> str:
        return f"there is no job {self.args[0]!r}"


@dataclass(frozen=True)
class JobRow:
    """A job as stored. Times are seconds since the epoch, None where it hasn't come so far.

    Its spec is a text until somebody asks for it: of the thousands of jobs that a list or a pass
    goes over, few are looked into.
    """

    id: str
    name: str
    state: JobState
    reason: str
    """Why it is in this state, or what a queued job waits for; one sentence or empty."""
    priority: int
    file: str
    """The job file as the user named it."""
    spec_text: str
    """The spec as it is stored."""
    job_dir: str
    submitted_at: float
    started_at: float | None
    ended_at: float | None
    attempt: int
    """The current attempt, 0 before the first."""
    placement_group: str
    nodes: tuple[NodeSlot, ...]
    step: int
    """Newest step recorded, -1 for none."""
    timeline: int
    loss: float | None
    submitted_by: str = ""
    """Whose turn in the queue it takes, as they call themselves."""
    granted_at: float | None = None
    """When it was given nodes last."""
    goes_on_at: int | None = None
    """The step that a way back leads to; None once a step has followed."""

    @property
    def stands_at(self) -> int:
        """Newest step that was not given up, -1 for none."""
        return stands_at(self.step, self.goes_on_at)

    @property
    def spec(self) -> JobSpec:
        """The completed spec."""
        return stored_spec(self.spec_text)

    @property
    def planned_steps(self) -> int:
        """``training.steps`` of the spec, without the rest of it."""
        return int(json.loads(self.spec_text)["training"]["steps"])

    @property
    def fp8_format(self) -> str:
        """``fp8.format`` of the spec, in the same way."""
        return str(json.loads(self.spec_text)["fp8"].get("format") or "HYBRID")

    @functools.cached_property
    def asks(self) -> Asks:
        """What the spec asks of the queue; worked out once."""
        return asks_of(self.spec)

    @functools.cached_property
    def ticket(self) -> Ticket:
        """The job as the queue sees it."""
        need = self.asks.need
        holds = bool(self.nodes)
        return Ticket(
            job=self.id,
            user=self.submitted_by,
            priority=self.priority,
            since=(self.granted_at or self.submitted_at) if holds else self.submitted_at,
            slots=sum(seat.slots for seat in self.nodes) if holds else need.nodes * need.slots,
            preemptible=self.asks.preemptible,
        )

    def take_over(self, before: JobRow) -> None:
        """Use what was worked out of the same spec, from the row as it was read before."""
        if "asks" in before.__dict__ and before.spec_text == self.spec_text:
            self.__dict__["asks"] = before.asks


def stands_at(step: int, goes_on_at: int | None) -> int:
    """``JobRow.stands_at``."""
    return step if goes_on_at is None else min(step, goes_on_at - 1)


def dump(value: object) -> str:
    """JSON text of a column; ValueError for NaN and infinities, which JSON doesn't have."""
    return json.dumps(value, separators=(",", ":"), allow_nan=False)


def page_of(table: sa.Table, job: str, after: int, limit: int | None) -> sa.Select[Any]:
    """The rows of a job with an id above ``after``, oldest first, ``limit`` at most."""
    query = sa.select(table).where(table.c.job == job, table.c.id > after).order_by(table.c.id)
    return query if limit is None else query.limit(limit)


JOB = tuple(column for column in jobs.c if column.name != "detector_state")
"""Columns of a job's row that say what it is."""


def stored_job(db: Connection, job: str) -> RowMapping:
    """The job's row; raises ``UnknownJobError``."""
    row = db.execute(sa.select(*JOB).where(jobs.c.id == job)).mappings().one_or_none()
    if row is None:
        raise UnknownJobError(job)
    return row


def submit_key(key: str, by: str) -> str:
    """What is kept of a client's key: those of two users are two, though they be the same word."""
    return hashlib.sha256(f"{by}\0{key}".encode()).hexdigest()


def submitted_under(db: Connection, key: str, by: str) -> RowMapping | None:
    """The row of the job that ``by`` submitted under ``key``."""
    # Stores of before have the key itself.
    under = jobs.c.submit_key.in_([submit_key(key, by), key])
    query = sa.select(*JOB).where(under, jobs.c.submitted_by == by)
    return db.execute(query).mappings().first()


def settled(row: JobRow) -> bool:
    """Whether nothing more will happen by itself: ended or paused, and its nodes given back."""
    at_rest = row.state.terminal or row.state is JobState.PAUSED
    return at_rest and not row.placement_group


def job_row(row: RowMapping) -> JobRow:
    """The row as a value."""
    values = {k: row[k] for k in JobRow.__dataclass_fields__ if k != "spec_text"}
    values["state"] = state_named(row["state"])
    values["spec_text"] = row["spec"]
    values["nodes"] = tuple(NodeSlot(**n) for n in json.loads(row["nodes"]))
    return JobRow(**values)


def step_context(row: RowMapping) -> StepContext:
    """The row of ``contexts`` as a value."""
    return StepContext(
        attempt=row["attempt"],
        timeline=row["timeline"],
        step=row["step"],
        held=tuple(int(n) for n in row["held"].split(",") if n),
        decides=bool(row["decides"]),
        ended=bool(row["ended"]),
    )


def begun_after(db: Connection, row: RowMapping, after: int, reason: str) -> bool:
    """Whether the current attempt is the answer to the same question, asked before."""
    asked = sa.and_(attempts.c.job == row["id"], attempts.c.attempt == row["attempt"])
    begun = db.execute(sa.select(attempts).where(asked)).mappings().one()
    same = begun["reason"] == reason and begun["sequence"] == 0
    return same and row["attempt"] == after + 1


@functools.lru_cache(maxsize=1024)
def stored_spec(text: str) -> JobSpec:
    """A stored spec; the same text is read again and again."""
    return JobSpec.model_validate_json(text)


def add_event(db: Connection, job: str, attempt: int, event: EventDraft) -> None:
    """Write an event."""
    add_events(db, [(job, attempt)], event)


def add_events(db: Connection, jobs: Iterable[Sequence[Any]], event: EventDraft) -> None:
    """Write the same event of each of ``jobs``, (job, attempt), in one statement."""
    told = {
        "time": event.time,
        "kind": event.kind,
        "message": event.message,
        "detail": dump(dict(event.detail)),
    }
    rows = [{"job": job, "attempt": attempt, **told} for job, attempt in jobs]
    if rows:
        db.execute(sa.insert(events), rows)


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
        if cause is not Cause.PREEMPTED:
            config = stored_spec(row["spec"]).notifications
            standing = stands_at(now_stored["step"], now_stored["goes_on_at"])
            add_webhook(db, now_stored, config, after, cause, reason, time, standing)
        step = now_stored["step"]
        for control, answer in answer_the_rest(db, row["id"], after, step, reason, time):
            notice = answered(control, answer)
            draft = EventDraft(notice.kind, time, notice.message, notice.detail)
            add_event(db, row["id"], row["attempt"], draft)


def set_detector_state(db: Connection, job: str, text: str) -> None:
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


def store_batch(
    db: Connection, row: RowMapping, attempt: int, batch: SupervisorBatch, time: float
) -> None:
    """Write all that a batch tells, its transition last."""
    job = row["id"]
    place = {"job": job, "attempt": attempt}
    for event in batch.events:
        add_event(db, job, attempt, event)
    if batch.steps:
        rows = [
            {
                **place,
                "timeline": s["timeline"],
                "step": s["step"],
                "drills": ",".join(map(str, s.get("drills", ()))),
                "batch": s["batch"],
                "body": dump(dict(s)),
            }
            for s in batch.steps
        ]
        db.execute(sa.insert(steps), rows)
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
        set_detector_state(db, job, dump(dict(batch.detector_state)))
        changed["detector_state"] = None
    if changed:
        db.execute(sa.update(jobs).where(jobs.c.id == job).values(changed))
    if batch.transition:
        cause = batch.transition[1]
        after = next_state(state_named(row["state"]), cause)
        told = [e.message for e in batch.events] or [a.reason for a in batch.actions]
        reason = told[-1] if told else cause.value
        set_state(db, row, cause, after, reason, time, {}, brief=bool(batch.events))
