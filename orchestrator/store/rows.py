"""Rows of the store's tables: what they mean, and how the plainest are read and written.

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
from orchestrator.lifecycle import JobState, state_named
from orchestrator.node_slot import NodeSlot
from orchestrator.placement.asks import Asks, asks_of
from orchestrator.placement.fair_queue import Ticket
from orchestrator.protocol import StepContext
from orchestrator.spec.job import JobSpec
from orchestrator.store.tables import events, jobs


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


def page_of(
    table: sa.Table, job: str, after: int, limit: int | None, *columns: sa.Column[Any]
) -> sa.Select[Any]:
    """The rows of a job with an id above ``after``, oldest first, ``limit`` at most; whole, or
    these ``columns`` of them."""
    what = sa.select(*columns) if columns else sa.select(table)
    query = what.where(table.c.job == job, table.c.id > after).order_by(table.c.id)
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


def seats_in(stored: str) -> tuple[NodeSlot, ...]:
    """The seats that a column holds."""
    return tuple(NodeSlot(**seat) for seat in json.loads(stored))


def job_row(row: RowMapping) -> JobRow:
    """The row as a value."""
    values = {k: row[k] for k in JobRow.__dataclass_fields__ if k != "spec_text"}
    values["state"] = state_named(row["state"])
    values["spec_text"] = row["spec"]
    values["nodes"] = seats_in(row["nodes"])
    return JobRow(**values)


def step_columns(record: Mapping[str, Any]) -> dict[str, Any]:
    """A ``StepRecord.to_json()`` as the columns of its row."""
    body = {k: v for k, v in record.items() if k != "tensors"}
    return {
        "timeline": record["timeline"],
        "step": record["step"],
        "drills": ",".join(map(str, record.get("drills", ()))),
        "batch": record["batch"],
        "body": dump(body),
        "tensors": dump(record.get("tensors", {})),
    }


def step_record(row: RowMapping) -> dict[str, Any]:
    """The row of a step as it was told."""
    body: dict[str, Any] = json.loads(row["body"])
    return body if row["tensors"] is None else {**body, "tensors": json.loads(row["tensors"])}


def light_record(row: RowMapping) -> dict[str, Any]:
    """The same without its tensors' statistics, which needn't have been read."""
    return {**json.loads(row["body"]), "tensors": {}}


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
