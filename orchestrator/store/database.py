"""The store: jobs, attempts, events, incidents, actions and steps, in one database.

Promises: the controller is its only writer; everything that belongs together is written
in one transaction; a supervisor's batch of an attempt that is no longer the current one,
or of a job that has ended, is refused; a batch sent twice is stored once; event ids only
grow. SQLite (WAL) by default, any SQLAlchemy URL otherwise.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from importlib.metadata import version
from typing import Any

import sqlalchemy as sa
from sqlalchemy.engine import Connection, Engine

from monitoring.prometheus import Numbers
from monitoring.records import Incident
from orchestrator.actions import Action
from orchestrator.events import EventDraft
from orchestrator.lifecycle import Cause, JobState, TransitionRefused, next_state, state_named
from orchestrator.node_slot import NodeSlot
from orchestrator.protocol import (
    Acknowledgement,
    FencedError,
    JobHistory,
    ResumeState,
    StepContext,
    SupervisorBatch,
)
from orchestrator.recovery.controls import Control, in_vain, put_off
from orchestrator.recovery.resume import NEWEST_STEPS, batches_of, fired_drills, standing
from orchestrator.spec.degrees import on_nodes
from orchestrator.spec.job import JobSpec, spec_data
from orchestrator.store.controls import (
    ControlConflictError,
    ControlRefusedError,
    ControlRow,
    UnknownControlError,
    add_control,
    open_controls,
    stored_control,
    stored_controls,
)
from orchestrator.store.errors import passing_trouble
from orchestrator.store.group_commit import GroupCommit
from orchestrator.store.nodes import NodeRecords
from orchestrator.store.numbers import numbers
from orchestrator.store.pages import Pages
from orchestrator.store.rows import (
    JOB,
    JobRow,
    UnknownJobError,
    add_event,
    add_events,
    begun_after,
    detector_state_of,
    dump,
    job_row,
    page_of,
    set_state,
    step_context,
    store_batch,
    stored_job,
    stored_spec,
    submit_key,
    submitted_under,
    transition_refusal,
)
from orchestrator.store.tables import (
    actions,
    add_missing,
    attempts,
    contexts,
    events,
    incidents,
    jobs,
    metadata,
    steps,
)
from orchestrator.store.tended import TendedJobs
from orchestrator.store.tokens import TokenRecords
from orchestrator.store.webhooks import Delivery, due_webhooks, set_due

MOST_WAITING = 500
"""Jobs that are told in one transaction that they wait."""
BUSY_MS = 10_000
"""Milliseconds that SQLite waits for another writer."""


class Store:
    """Opens (and creates) the database at a SQLAlchemy ``url``, as ``sqlite:////path/store.db``."""

    def __init__(self, url: str) -> None:
        self._engine = _engine(url)
        # One writer at a time also within the process: SQLite would answer "locked".
        self._writing = threading.RLock()
        metadata.create_all(self._engine)
        add_missing(self._engine)
        self.nodes = NodeRecords(self._write, self._read)
        """What is held against nodes."""
        self.pages = Pages(self._read)
        """What is there, a page at a time."""
        self.tokens = TokenRecords(self._write, self._read)
        """Who may use the HTTP API."""
        self._together = GroupCommit(self._writing, self._write)
        self.tended = TendedJobs(self._read)
        """Jobs that a pass looks at."""

    def close(self) -> None:
        self._engine.dispose()

    # -- jobs

    def add_job(
        self,
        job: str,
        spec: JobSpec,
        job_dir: str,
        file: str,
        time: float,
        *,
        by: str = "",
        key: str | None = None,
    ) -> str:
        """Store a new queued job; its ``spec`` is complete and checked.

        Returns its id, or that of the job that ``by`` submitted under ``key`` before.
        """
        row = {
            "id": job,
            "name": spec.name,
            "state": JobState.QUEUED.word,
            "reason": "",
            "priority": spec.resources.priority,
            "file": file,
            "spec": dump(spec_data(spec)),
            "job_dir": job_dir,
            "submitted_at": time,
            "submitted_by": by,
            "submit_key": None if key is None else submit_key(key, by),
        }
        told = EventDraft("submitted", time, f"submitted from {file}", {})

        def add(db: Connection) -> str:
            if key is not None and (known := submitted_under(db, key, by)) is not None:
                return str(known["id"])
            db.execute(sa.insert(jobs).values(row))
            add_event(db, job, 0, told)
            return job

        return self._together.do(job, add)

    def job_of_key(self, key: str, by: str) -> JobRow | None:
        """The job that ``by`` submitted under ``key``."""
        with self._read() as db:
            row = submitted_under(db, key, by)
            return None if row is None else job_row(row)

    def served_at(self) -> dict[str, float]:
        """When each user was given nodes last, for those that were."""
        newest = sa.func.max(jobs.c.granted_at)
        query = sa.select(jobs.c.submitted_by, newest).group_by(jobs.c.submitted_by)
        with self._read() as db:
            return {user: at for user, at in db.execute(query) if at is not None}

    def job(self, job: str) -> JobRow:
        """The job with exactly this id; raises ``UnknownJobError``."""
        with self._read() as db:
            return job_row(stored_job(db, job))

    def jobs(self, *states: JobState) -> list[JobRow]:
        """Jobs in one of ``states`` (all without), oldest first."""
        query = sa.select(*JOB).order_by(jobs.c.submitted_at, jobs.c.id)
        if states:
            query = query.where(jobs.c.state.in_([s.word for s in states]))
        with self._read() as db:
            return [job_row(row) for row in db.execute(query).mappings()]

    def jobs_to_tend(self) -> list[JobRow]:
        """Jobs that aren't at rest: on their way, or holding nodes after their end."""
        return self.tended.all()[0]

    def change(self, job: str, cause: Cause, reason: str, time: float, **detail: Any) -> JobState:
        """Move a job along the lifecycle table; raises ``TransitionRefused``, changing nothing."""
        with self._write(job) as db:
            row = stored_job(db, job)
            after = next_state(state_named(row["state"]), cause)
            set_state(db, row, cause, after, reason, time, detail)
            return after

    def resume_as(
        self, job: str, spec: JobSpec, reason: str, told: EventDraft, time: float
    ) -> None:
        """Queue a job again with another spec, which ``told`` tells; else ``TransitionRefused``."""
        with self._write(job) as db:
            row = stored_job(db, job)
            after = next_state(state_named(row["state"]), Cause.RESUME_ASKED)
            set_state(db, row, Cause.RESUME_ASKED, after, reason, time, {})
            given = {"spec": dump(spec_data(spec))}
            db.execute(sa.update(jobs).where(jobs.c.id == job).values(given))
            add_event(db, job, row["attempt"], told)

    def grant(self, job: str, placement_group: str, nodes: Sequence[NodeSlot], time: float) -> None:
        """Give a queued job its nodes."""
        with self._write(job) as db:
            row = stored_job(db, job)
            after = next_state(state_named(row["state"]), Cause.NODES_GRANTED)
            where = ", ".join(
                f"{n.slots} on {n.node_ip}{' (spare)' if n.spare else ''}" for n in nodes
            )
            reason = f"slots granted: {where}"
            detail = {"nodes": [asdict(n) for n in nodes]}
            set_state(db, row, Cause.NODES_GRANTED, after, reason, time, detail)
            given = {
                "placement_group": placement_group,
                "nodes": dump(detail["nodes"]),
                "granted_at": time,
            }
            db.execute(sa.update(jobs).where(jobs.c.id == job).values(given))

    def replace_nodes(self, job: str, nodes: Sequence[NodeSlot], *told: EventDraft) -> None:
        """The job stands elsewhere now, which ``told`` tells."""
        with self._write(job) as db:
            attempt = stored_job(db, job)["attempt"]
            given = {"nodes": dump([asdict(n) for n in nodes])}
            db.execute(sa.update(jobs).where(jobs.c.id == job).values(given))
            for event in told:
                add_event(db, job, attempt, event)

    def release(self, job: str) -> None:
        """The job holds no nodes any more."""
        with self._write(job) as db:
            none = {"placement_group": "", "nodes": "[]"}
            db.execute(sa.update(jobs).where(jobs.c.id == job).values(none))

    def wait(self, job: str, reason: str, time: float) -> None:
        """Say what a queued job waits for; an event is added only when that changes."""
        with self._write(job) as db:
            row = stored_job(db, job)
            if row["reason"] == reason:
                return
            db.execute(sa.update(jobs).where(jobs.c.id == job).values(reason=reason))
            add_event(db, job, row["attempt"], EventDraft("waiting", time, reason, {}))

    def wait_all(self, waiting: Sequence[str], reason: str, told: str, time: float) -> None:
        """Say of many queued jobs what they wait for, ``told`` in an event of each."""
        for first in range(0, len(waiting), MOST_WAITING):
            some = waiting[first : first + MOST_WAITING]
            with self._write(*some) as db:
                mine = sa.and_(jobs.c.id.in_(some), jobs.c.state == JobState.QUEUED.word)
                found = db.execute(sa.select(jobs.c.id, jobs.c.attempt).where(mine)).all()
                db.execute(sa.update(jobs).where(mine).values(reason=reason))
                add_events(db, found, EventDraft("waiting", time, told, {}))

    def note(self, job: str, event: EventDraft) -> None:
        """Add an event of the controller's own."""
        with self._write() as db:
            add_event(db, job, stored_job(db, job)["attempt"], event)

    # -- attempts

    def begin_attempt(
        self, job: str, reason: str, time: float, *, after: int | None = None
    ) -> ResumeState:
        """Allocate the next attempt; from here on batches of earlier ones are refused.

        ``after``: the attempt that asks for it. Asking again, for the same reason and before
        the new one has told anything, allocates no further one. Raises ``FencedError`` when
        that is not the current attempt, ``TransitionRefused`` for a job that doesn't hold nodes.
        """
        with self._write(job) as db:
            row = stored_job(db, job)
            state = state_named(row["state"])
            if not state.holds_nodes or state is JobState.CANCELLING:
                raise TransitionRefused(state, Cause.RANK_LOST)
            if after is not None and after != row["attempt"]:
                if not begun_after(db, row, after, reason):
                    raise FencedError(f"attempt {after} is over, {row['attempt']} is current")
                return self.resume_state(job)
            number = row["attempt"] + 1
            started = {"job": job, "attempt": number, "reason": reason, "started_at": time}
            db.execute(sa.insert(attempts).values(started))
            db.execute(sa.update(jobs).where(jobs.c.id == job).values(attempt=number))
            # Why in full is in the action's event, where a restart has one.
            told = f"attempt {number}: {reason.partition(': ')[0].rstrip('.')}"
            # A new supervisor takes the detectors' state from here, the same one goes on with its.
            detail = {
                "attempt": number,
                "new_supervisor": after is None,
                "octavo": version("octavo"),
            }
            draft = EventDraft("attempt", time, told, detail)
            add_event(db, job, number, draft)
        return self.resume_state(job)

    def attempts(self, job: str) -> list[dict[str, Any]]:
        """All attempts of a job, oldest first: attempt, reason, started_at."""
        columns = (attempts.c.attempt, attempts.c.reason, attempts.c.started_at)
        query = sa.select(*columns).where(attempts.c.job == job).order_by(attempts.c.attempt)
        with self._read() as db:
            return [dict(row) for row in db.execute(query).mappings()]

    def resume_state(self, job: str) -> ResumeState:
        """What the current attempt starts from."""
        with self._read() as db:
            row = job_row(stored_job(db, job))
            drills = sa.select(steps.c.drills).where(steps.c.job == job, steps.c.drills != "")
            recorded = [int(n) for (text,) in db.execute(drills) for n in text.split(",")]
            used = sa.select(steps.c.step, steps.c.batch).where(steps.c.job == job)
            newest = used.order_by(steps.c.id.desc()).limit(NEWEST_STEPS)
            batches = [(n, batch) for n, batch in db.execute(newest) if batch is not None]
            detectors = detector_state_of(db, job)
        done = self.actions(job)
        sum_ = standing(row.spec, done)
        working = sum(not node.spare for node in row.nodes)
        # With resources.min_nodes it may hold fewer nodes than it asks for.
        elastic = working and row.spec.resources.min_nodes is not None
        spec = on_nodes(row.spec, working) if elastic else row.spec
        return ResumeState(
            job=job,
            spec=spec,
            job_dir=row.job_dir,
            attempt=row.attempt,
            timeline=max(sum_.timeline, row.timeline),
            step=row.step,
            actions=tuple(done),
            precision=sum_.precision,
            ledger=sum_.ledger,
            lr_scale=sum_.lr_scale,
            exchange=sum_.exchange,
            fired_drills=fired_drills(row.spec, recorded, self.incidents(job)),
            detector_state=detectors,
            nodes=tuple(node for node in row.nodes if not node.spare),
            spares=tuple(node for node in row.nodes if node.spare),
            batches=batches_of(reversed(batches)),
            placement_group=row.placement_group,
        )

    def record(
        self, job: str, attempt: int, batch: SupervisorBatch, time: float
    ) -> Acknowledgement:
        """Store all of ``batch``, or nothing and say why."""
        return self._together.do(job, lambda db: _record(db, job, attempt, batch, time))

    def decide(self, job: str, batch: SupervisorBatch, time: float) -> None:
        """Store what the controller itself saw and decided; its number in a row means nothing.

        Raises ``TransitionRefused``, changing nothing.
        """
        with self._write(job) as db:
            row = stored_job(db, job)
            store_batch(db, row, row["attempt"], batch, time)

    # -- what people ask of running jobs

    def ask(self, job: str, control: Control) -> ControlRow:
        """Store a control; asked again under its key, the one that is there.

        Raises ``ControlConflictError`` for a key that asked for something else, and
        ``ControlRefusedError`` for a job that isn't running. The pause of a queued job is
        done at once; what is asked of a paused one waits for its resume.
        """
        with self._write(job) as db:
            row = stored_job(db, job)
            if (known := stored_control(db, job, control.key)) is not None:
                if not known.control.same_order(control):
                    raise ControlConflictError(control.key)
                return known
            state = state_named(row["state"])
            if refused := in_vain(job, state, control.kind):
                raise ControlRefusedError(refused)
            waits = f"done first once the job is resumed (`octavo resume {job}`)"
            add_control(db, job, control, waits if put_off(state, control.kind) else "")
            if state is JobState.QUEUED:
                told = f"paused by {control.by} while it waited for nodes"
                after = next_state(state, Cause.PAUSE_ASKED)
                set_state(db, row, Cause.PAUSE_ASKED, after, told, control.time, {})
            found = stored_control(db, job, control.key)
        assert found is not None
        return found

    def knows_control(self, job: str, key: str) -> bool:
        """Whether something was asked of the job under this key."""
        with self._read() as db:
            return stored_control(db, job, key) is not None

    def control(self, job: str, key: str) -> ControlRow:
        """What became of a control; raises ``UnknownControlError``."""
        with self._read() as db:
            found = stored_control(db, job, key)
        if found is None:
            raise UnknownControlError(job, key)
        return found

    def controls(self, job: str) -> list[ControlRow]:
        """All that was asked of a job, oldest first."""
        with self._read() as db:
            return stored_controls(db, job)

    def open_controls(self) -> dict[str, list[Control]]:
        """What waits for an answer, by job, oldest first."""
        found: dict[str, list[Control]] = {}
        with self._read() as db:
            for row in open_controls(db):
                found.setdefault(row.job, []).append(row.control)
        return found

    # -- what is posted to webhooks

    def due_webhooks(self, now: float) -> list[Delivery]:
        """Notifications whose time has come, oldest first."""
        with self._read() as db:
            return [
                Delivery(
                    row["id"],
                    row["job"],
                    json.loads(row["body"]),
                    row["tries"],
                    stored_spec(row["spec"]).notifications,
                )
                for row in due_webhooks(db, now)
            ]

    def postpone_webhook(self, delivery: Delivery, due_at: float) -> None:
        """It did not arrive; the next try is at ``due_at``."""
        with self._write() as db:
            set_due(db, delivery.id, due_at)

    def settle_webhook(self, delivery: Delivery, event: EventDraft) -> None:
        """It arrived or is given up, which ``event`` tells."""
        with self._write() as db:
            set_due(db, delivery.id, None)
            add_event(db, delivery.job, stored_job(db, delivery.job)["attempt"], event)

    # -- what is read back

    def events(self, job: str, after: int = 0, limit: int = 500) -> list[dict[str, Any]]:
        """Events with an id above ``after``, oldest first."""
        with self._read() as db:
            rows = db.execute(page_of(events, job, after, limit)).mappings()
            return [{**row, "detail": json.loads(row["detail"])} for row in rows]

    def events_of_attempt(self, job: str, attempt: int, kind: str) -> list[dict[str, Any]]:
        """Events of a kind that an attempt told, oldest first."""
        query = page_of(events, job, 0, None)
        query = query.where(events.c.attempt == attempt, events.c.kind == kind)
        with self._read() as db:
            rows = db.execute(query).mappings()
            return [{**row, "detail": json.loads(row["detail"])} for row in rows]

    def newest_event(self, job: str, kinds: Sequence[str]) -> dict[str, Any] | None:
        """The last event of any of ``kinds``; None where there is none."""
        newest = (
            sa.select(events)
            .where(events.c.job == job, events.c.kind.in_(kinds))
            .order_by(events.c.id.desc())
            .limit(1)
        )
        with self._read() as db:
            row = db.execute(newest).mappings().one_or_none()
            return None if row is None else {**row, "detail": json.loads(row["detail"])}

    def steps(self, job: str, after: int = 0, limit: int = 500) -> list[dict[str, Any]]:
        """``StepRecord.to_json()`` with an ``id``, in the order they were stored."""
        with self._read() as db:
            rows = db.execute(page_of(steps, job, after, limit)).mappings()
            return [{"id": row["id"], **json.loads(row["body"])} for row in rows]

    def newest_step(self, job: str) -> int:
        """The ``id`` of the newest step record; 0 where there is none."""
        newest = sa.select(sa.func.max(steps.c.id)).where(steps.c.job == job)
        with self._read() as db:
            return db.execute(newest).scalar_one() or 0

    def incidents(self, job: str, attempt: int | None = None) -> list[Incident]:
        """All incidents of a job, or of one attempt of it, oldest first."""
        query = page_of(incidents, job, 0, None)
        if attempt is not None:
            query = query.where(incidents.c.attempt == attempt)
        with self._read() as db:
            rows = db.execute(query).mappings()
            return [Incident.from_json(json.loads(row["body"])) for row in rows]

    def actions(self, job: str) -> list[Action]:
        """All actions of a job, oldest first."""
        with self._read() as db:
            rows = db.execute(page_of(actions, job, 0, None)).mappings()
            return [Action.from_json(json.loads(row["body"])) for row in rows]

    def numbers(self, now: float) -> Numbers:
        """What ``/metrics`` tells at this moment."""
        with self._read() as db:
            return numbers(db, now)

    def contexts(self, job: str) -> list[StepContext]:
        """What supervisors knew beside step records, where it was unusual; oldest first."""
        with self._read() as db:
            rows = db.execute(page_of(contexts, job, 0, None)).mappings()
            return [step_context(row) for row in rows]

    def history(self, job: str) -> JobHistory:
        """All of a job's past but its per-tensor statistics."""
        with self._read() as db:
            bodies = db.execute(page_of(steps, job, 0, None)).mappings()
            past = tuple({**json.loads(row["body"]), "tensors": {}} for row in bodies)
            rows = db.execute(page_of(events, job, 0, None)).mappings()
            told = tuple(
                {
                    "kind": row["kind"],
                    "time": row["time"],
                    "message": row["message"],
                    "detail": json.loads(row["detail"]),
                }
                for row in rows
            )
        seen = tuple(incident.to_json() for incident in self.incidents(job))
        return JobHistory(past, seen, told)

    @contextmanager
    def _write(self, *job: str) -> Iterator[Connection]:
        """A transaction; ``job``: whose rows it may change."""
        try:
            with passing_trouble(), self._writing, self._engine.begin() as db:
                yield db
        finally:
            if job:
                self.tended.written(*job)

    @contextmanager
    def _read(self) -> Iterator[Connection]:
        with passing_trouble(), self._engine.connect() as db:
            yield db


def _record(
    db: Connection, job: str, attempt: int, batch: SupervisorBatch, time: float
) -> Acknowledgement:
    try:
        row = stored_job(db, job)
    except UnknownJobError as unknown:
        return Acknowledgement(False, str(unknown))
    current, state = row["attempt"], state_named(row["state"])
    if attempt != current:
        return Acknowledgement(False, f"attempt {attempt} is over, {current} is current")
    mine = sa.and_(attempts.c.job == job, attempts.c.attempt == attempt)
    last = db.execute(sa.select(attempts.c.sequence).where(mine)).scalar_one_or_none()
    if last is None:
        return Acknowledgement(False, f"attempt {attempt} was never begun")
    if batch.sequence <= last:
        return Acknowledgement(True, f"batch {batch.sequence} is stored already")
    if batch.sequence != last + 1:
        return Acknowledgement(False, f"batch {last + 1} comes before {batch.sequence}")
    if not state.holds_nodes:
        return Acknowledgement(False, f"the job is {state.word}")
    refused = transition_refusal(state, batch.transition)
    if refused:
        return Acknowledgement(False, refused)
    store_batch(db, row, attempt, batch, time)
    db.execute(sa.update(attempts).where(mine).values(sequence=batch.sequence))
    return Acknowledgement(True)


def _engine(url: str) -> Engine:
    engine = sa.create_engine(url)
    if engine.dialect.name != "sqlite":
        return engine

    # pysqlite begins transactions late and on its own; these two put BEGIN where it belongs.
    @sa.event.listens_for(engine, "connect")
    def _connected(connection: Any, _record: Any) -> None:
        connection.isolation_level = None
        for pragma in ("journal_mode=WAL", f"busy_timeout={BUSY_MS}", "foreign_keys=ON"):
            connection.execute(f"PRAGMA {pragma}")

    @sa.event.listens_for(engine, "begin")
    def _begun(connection: Connection) -> None:
        connection.exec_driver_sql("BEGIN")

    return engine
