"""The attempts of a job: how one begins, what it starts from, and what is taken from it.

Promises: a batch of an attempt that is no longer the current one, or of a job that has ended, is
refused; a batch sent twice is stored once, whole or not at all; an attempt asked for twice begins
once.
"""

from __future__ import annotations

from importlib.metadata import version
from typing import Any

import sqlalchemy as sa
from sqlalchemy.engine import Connection, RowMapping

from orchestrator.events import EventDraft
from orchestrator.lifecycle import Cause, JobState, TransitionRefused, state_named
from orchestrator.node_slot import NodeSlot, working
from orchestrator.protocol import Acknowledgement, FencedError, ResumeState, SupervisorBatch
from orchestrator.recovery.resume import (
    NEWEST_STEPS,
    NEWEST_WRITTEN,
    batches_of,
    fired_drills,
    standing,
)
from orchestrator.saved.restore import WRITTEN_OR_BACK
from orchestrator.spec.degrees import on_nodes
from orchestrator.store.batches import detector_state_of, store_batch
from orchestrator.store.engine import Reads, Writes
from orchestrator.store.group_commit import GroupCommit
from orchestrator.store.past import PastRecords
from orchestrator.store.rows import (
    JobRow,
    UnknownJobError,
    add_event,
    job_row,
    seats_in,
    stored_job,
)
from orchestrator.store.tables import attempts, jobs, steps
from orchestrator.store.transitions import transition_refusal


class AttemptRecords:
    """The attempts of a store; ``writing`` and ``reading`` are its transactions, ``together``
    those that many share, ``past`` what is read back."""

    def __init__(
        self, writing: Writes, reading: Reads, together: GroupCommit, past: PastRecords
    ) -> None:
        self._writing = writing
        self._reading = reading
        self._together = together
        self._past = past

    def begin(self, job: str, reason: str, time: float, *, after: int | None = None) -> ResumeState:
        """Allocate the next attempt; from here on batches of earlier ones are refused.

        ``after``: the attempt that asks for it. Asking again, for the same reason and before
        the new one has told anything, allocates no further one. Raises ``FencedError`` when
        that is not the current attempt, ``TransitionRefused`` for a job that doesn't hold nodes.
        """
        with self._writing(job) as db:
            row = stored_job(db, job)
            state = state_named(row["state"])
            if not state.holds_nodes or state is JobState.CANCELLING:
                raise TransitionRefused(state, Cause.RANK_LOST)
            if after is not None and after != row["attempt"]:
                if not _begun_after(db, row, after, reason):
                    raise FencedError(f"attempt {after} is over, {row['attempt']} is current")
                return self.resume_state(job)
            number = row["attempt"] + 1
            started = {"job": job, "attempt": number, "reason": reason, "started_at": time}
            db.execute(sa.insert(attempts).values(**started, nodes=row["nodes"]))
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

    def of(self, job: str) -> list[dict[str, Any]]:
        """All attempts of a job, oldest first: attempt, reason, started_at."""
        columns = (attempts.c.attempt, attempts.c.reason, attempts.c.started_at)
        query = sa.select(*columns).where(attempts.c.job == job).order_by(attempts.c.attempt)
        with self._reading() as db:
            return [dict(row) for row in db.execute(query).mappings()]

    def nodes_of(self, job: str) -> dict[int, int]:
        """On how many nodes each attempt of a job has ranks; 0 in those of an older Octavo."""
        query = sa.select(attempts.c.attempt, attempts.c.nodes).where(attempts.c.job == job)
        with self._reading() as db:
            told = [(number, seats_in(nodes or "[]")) for number, nodes in db.execute(query)]
        return {number: len(working(seats)) for number, seats in told}

    def seats_of(self, job: JobRow) -> tuple[NodeSlot, ...]:
        """Where the ranks of the job's present attempt run, or ran: ``job.nodes`` may be where
        those of the next one will."""
        mine = (attempts.c.job == job.id, attempts.c.attempt == job.attempt)
        with self._reading() as db:
            told = db.execute(sa.select(attempts.c.nodes).where(*mine)).scalar()
        return seats_in(told) if told else job.nodes

    def resume_state(self, job: str) -> ResumeState:
        """What the current attempt starts from."""
        with self._reading() as db:
            row = job_row(stored_job(db, job))
            drills = sa.select(steps.c.drills).where(steps.c.job == job, steps.c.drills != "")
            recorded = [int(n) for (text,) in db.execute(drills) for n in text.split(",")]
            used = sa.select(steps.c.step, steps.c.batch).where(steps.c.job == job)
            newest = used.order_by(steps.c.id.desc()).limit(NEWEST_STEPS)
            batches = [(n, batch) for n, batch in db.execute(newest) if batch is not None]
            detectors = detector_state_of(db, job)
        done = self._past.actions(job)
        sum_ = standing(row.spec, done)
        ranked = len(working(row.nodes))
        # With resources.min_nodes it may hold fewer nodes than it asks for.
        elastic = ranked and row.spec.resources.min_nodes is not None
        spec = on_nodes(row.spec, ranked) if elastic else row.spec
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
            fired_drills=fired_drills(row.spec, recorded, self._past.incidents(job)),
            detector_state=detectors,
            nodes=tuple(working(row.nodes)),
            spares=tuple(node for node in row.nodes if node.spare),
            batches=batches_of(reversed(batches)),
            placement_group=row.placement_group,
            written=tuple(self._past.newest_events(job, WRITTEN_OR_BACK, NEWEST_WRITTEN)),
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
        with self._writing(job) as db:
            row = stored_job(db, job)
            store_batch(db, row, row["attempt"], batch, time)


def _begun_after(db: Connection, row: RowMapping, after: int, reason: str) -> bool:
    """Whether the current attempt is the answer to the same question, asked before."""
    asked = sa.and_(attempts.c.job == row["id"], attempts.c.attempt == row["attempt"])
    begun = db.execute(sa.select(attempts).where(asked)).mappings().one()
    same = begun["reason"] == reason and begun["sequence"] == 0
    return same and row["attempt"] == after + 1


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
