"""The store: jobs, and by concern all that belongs to them, in one database.

Promises: the controller is its only writer; everything that belongs together is written
in one transaction; event ids only grow. SQLite (WAL) by default, any SQLAlchemy URL otherwise.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from monitoring.prometheus import Numbers
from orchestrator.events import EventDraft
from orchestrator.lifecycle import Cause, JobState, next_state, state_named
from orchestrator.node_slot import NodeSlot
from orchestrator.spec.job import JobSpec, spec_data
from orchestrator.store.attempts import AttemptRecords
from orchestrator.store.control_records import ControlRecords
from orchestrator.store.engine import open_engine
from orchestrator.store.errors import passing_trouble
from orchestrator.store.group_commit import GroupCommit
from orchestrator.store.nodes import NodeRecords, look_again
from orchestrator.store.numbers import numbers
from orchestrator.store.pages import Pages
from orchestrator.store.past import PastRecords
from orchestrator.store.rows import (
    JOB,
    JobRow,
    add_event,
    add_events,
    dump,
    job_row,
    stored_job,
    submit_key,
    submitted_under,
)
from orchestrator.store.tables import add_missing, jobs, metadata
from orchestrator.store.tended import TendedJobs
from orchestrator.store.tokens import TokenRecords
from orchestrator.store.transitions import set_state
from orchestrator.store.webhooks import WebhookRecords

MOST_WAITING = 500
"""Jobs that are told in one transaction that they wait."""


class Store:
    """Opens (and creates) the database at a SQLAlchemy ``url``, as ``sqlite:////path/store.db``."""

    def __init__(self, url: str) -> None:
        self._engine = open_engine(url)
        # One writer at a time also within the process: SQLite would answer "locked".
        self._writing = threading.RLock()
        metadata.create_all(self._engine)
        add_missing(self._engine)
        self._together = GroupCommit(self._writing, self._write)
        self.past = PastRecords(self._read)
        """What became of jobs: events, steps, incidents, actions."""
        self.attempts = AttemptRecords(self._write, self._read, self._together, self.past)
        """How jobs are tried, and what is taken from it."""
        self.controls = ControlRecords(self._write, self._read)
        """What people ask of jobs."""
        self.webhooks = WebhookRecords(self._write, self._read)
        """What is to be posted."""
        self.nodes = NodeRecords(self._write, self._read)
        """What is held against nodes."""
        self.pages = Pages(self._read)
        """What is there, a page at a time."""
        self.tokens = TokenRecords(self._write, self._read)
        """Who may use the HTTP API."""
        self.tended = TendedJobs(self._read)
        """Jobs that a pass looks at."""

    def close(self) -> None:
        self._engine.dispose()

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

    def change(self, job: str, cause: Cause, reason: str, time: float, **detail: Any) -> JobRow:
        """Move a job along the lifecycle table, and the job as it is then; raises
        ``TransitionRefused``, changing nothing."""
        with self._write(job) as db:
            row = stored_job(db, job)
            after = next_state(state_named(row["state"]), cause)
            set_state(db, row, cause, after, reason, time, detail)
            return job_row(stored_job(db, job))

    def resume(
        self,
        job: str,
        reason: str,
        time: float,
        told: Sequence[EventDraft] = (),
        spec: JobSpec | None = None,
    ) -> JobRow:
        """Queue a job again, with ``spec`` if it is to be another one, and what is ``told`` of
        that; nodes that it couldn't run on are looked at again. The job as it is then, else
        ``TransitionRefused``, changing nothing."""
        with self._write(job) as db:
            row = stored_job(db, job)
            after = next_state(state_named(row["state"]), Cause.RESUME_ASKED)
            set_state(db, row, Cause.RESUME_ASKED, after, reason, time, {})
            if spec is not None:
                given = {"spec": dump(spec_data(spec))}
                db.execute(sa.update(jobs).where(jobs.c.id == job).values(given))
            for event in told:
                add_event(db, job, row["attempt"], event)
            look_again(db, job, time)
            return job_row(stored_job(db, job))

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

    def numbers(self, now: float) -> Numbers:
        """What ``/metrics`` tells at this moment."""
        with self._read() as db:
            return numbers(db, now)

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
