"""The controller: what clients and supervisors ask of it, and the pass that moves jobs.

``step`` reads the store, dispatches by state and lets each job take its turn, one transition
each; a job that raises is logged and the next one goes on. All that must survive is in the store,
so a controller can be killed anywhere and the next one carries on. Time is an argument of
``step``; nodes and supervisors come through interfaces.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

from monitoring.prometheus import Numbers
from orchestrator.controller.admission import Admission
from orchestrator.controller.changes import Changes
from orchestrator.controller.intake import Intake
from orchestrator.controller.preemption import Preemption
from orchestrator.controller.seen import Act, Seen
from orchestrator.controller.spec_copy import replaced_copy
from orchestrator.controller.supervisors import Supervisors
from orchestrator.controller.tending import NoNodesError, Tending
from orchestrator.controller.waits import Waits
from orchestrator.events import EventDraft
from orchestrator.instant import Instant
from orchestrator.lifecycle import Cause, JobState, TransitionRefused
from orchestrator.nodes.desk import NodeDesk
from orchestrator.nodes.groups import NodeGroups
from orchestrator.nodes.rescue import Rescue
from orchestrator.nodes.roll import NodeRoll
from orchestrator.protocol import (
    Acknowledgement,
    JobHistory,
    PastMark,
    ResumeState,
    SupervisorBatch,
)
from orchestrator.recovery.controls import Control, in_vain, refused_at_once
from orchestrator.spec.config import QuarantineConfig
from orchestrator.spec.degrees import Word, as_asked, other_degrees
from orchestrator.spec.errors import Source
from orchestrator.spec.job import spec_of
from orchestrator.spec.trial import check_factory_model
from orchestrator.store.controls import ControlRefusedError, ControlRow
from orchestrator.store.database import Store
from orchestrator.store.rows import JobRow
from orchestrator.supervision.notices import ladder_renewed

logger = logging.getLogger(__name__)

REST = 4.0
"""Times as long as a pass took that the next one waits at least where no job moved in it: clients
who submit many jobs are answered first."""


class Controller:
    """One a store. ``jobs_dir``: where job directories go unless the spec says otherwise."""

    def __init__(
        self,
        store: Store,
        groups: NodeGroups,
        supervisors: Supervisors,
        jobs_dir: Path,
        *,
        fixed_cluster: bool = True,
        quarantine: QuarantineConfig | None = None,
        clock: Callable[[], float] = Instant.now,
    ) -> None:
        self.store = store
        self.changes = Changes()
        """Tells others that something was stored."""
        self.intake = Intake(store, jobs_dir, self.changes, clock)
        """Takes jobs in."""
        self.waits = Waits(store, self.changes)
        """What jobs wait for."""
        self.desk = NodeDesk(store, groups, quarantine, fixed=fixed_cluster)
        self.roll = NodeRoll(store, groups)
        preemption = Preemption(store, self.desk)
        self._admission = Admission(
            store, self.desk, preemption, self.waits, self._turn, fixed=fixed_cluster
        )
        rescue = Rescue(store, groups, clock, self.changes.notify)
        self._tending = Tending(
            store, self.desk, supervisors, rescue, preemption, self.waits, clock
        )
        self._clock = clock
        self._told: dict[str, str] = {}
        self._passed_at: float | None = None

    # -- what clients ask

    def cancel(self, job: str, reason: str) -> JobRow:
        """Ask for a job's end; one that is being cancelled already stays so.

        Raises ``TransitionRefused`` when it has ended.
        """
        row = self.store.job(job)
        if row.state is not JobState.CANCELLING:
            row = self.store.change(job, Cause.CANCEL_ASKED, reason, self._clock())
            self.changes.notify()
        return row

    def resume(self, job: str, reason: str, degrees: Mapping[Word, int] | None = None) -> JobRow:
        """Queue a paused, cancelled or failed job again; else ``TransitionRefused``.

        What was asked of it meanwhile is done first, a ladder that gave up begins anew, and nodes
        that it could not run on are looked at again. Its next attempt starts from the newest state
        that was saved, on any ``degrees``: those given replace the job's own. Raises ``SpecError``
        for what it can't be split into, or where its folder can't be written; nothing has changed
        then.
        """
        now = self._clock()
        row = self.store.job(job)
        if row.nodes:
            # Before: else what the last attempt showed would leave nodes out after they were let
            # back. Of a job whose nodes went back that is known, and Ray may be away.
            self.desk.settling.settle(row, now)
        renewed = ladder_renewed(self.store.past.actions(job))
        told: list[EventDraft] = []
        if renewed is not None:
            told.append(EventDraft(renewed.kind, now, renewed.message, renewed.detail))
        if not degrees:
            row = self.store.resume(job, reason, now, told)
        else:
            before = self.store.job(job)
            asked = Source(f"{job} --parallelism", as_asked(before.spec, degrees), {})
            spec = spec_of(asked)
            check_factory_model(spec, asked.file)
            told.insert(0, other_degrees(spec, now))
            with replaced_copy(Path(before.job_dir), spec, asked.file):
                row = self.store.resume(job, reason, now, told, spec)
        self.changes.notify()
        return row

    def ask(self, job: str, control: Control) -> ControlRow:
        """Take in what a person asks of a running job; durable on return.

        It is done, or answered with why not, whatever restarts in between. Raises
        ``ControlRefusedError`` for what is known to be in vain, and ``ControlConflictError``.
        """
        row = self.store.job(job)
        if not self.store.controls.knows(job, control.key):
            refused = in_vain(job, row.state, control.kind)
            refused = refused or refused_at_once(control, row.spec, row.step)
            if refused:
                raise ControlRefusedError(refused)
        asked = self.store.controls.ask(job, control)
        self.changes.notify()
        return asked

    def numbers(self) -> Numbers:
        """What Prometheus scrapes."""
        return replace(self.store.numbers(self._clock()), passed_at=self._passed_at)

    # -- what supervisors ask (ControllerPort)

    def next_attempt(self, job: str, attempt: int, reason: str) -> ResumeState:
        """Allocate the attempt after ``attempt``, on its nodes or those that stand in for them."""
        row = self.store.job(job)
        if row.attempt == attempt and (missing := self._tending.mend(row)):
            raise NoNodesError(f"{job} {missing}")
        resume = self.store.attempts.begin(job, reason, self._clock(), after=attempt)
        self.changes.notify()
        return resume

    def history(self, job: str, after: PastMark | None = None) -> JobHistory:
        """What is stored of a job's past, a page at a time."""
        return self.store.past.history(job, after)

    def report(self, job: str, attempt: int, batch: SupervisorBatch) -> Acknowledgement:
        """Store a batch in one transaction."""
        answer = self.store.attempts.record(job, attempt, batch, self._clock())
        if not answer.accepted:
            logger.warning("refused batch %d of %s: %s", batch.sequence, job, answer.reason)
        self.changes.notify(wake=batch.transition is not None)
        return answer

    # -- the loop

    def run(self, stop: threading.Event, every_s: float = 0.5) -> None:
        """``step`` until ``stop``, at least every ``every_s`` seconds."""
        while not stop.is_set():
            began, moved = time.monotonic(), False
            try:
                moved = self.step(self._clock())
            except Exception:
                logger.exception("a pass failed; the next one starts anew")
            if not moved:
                stop.wait(min(every_s, REST * (time.monotonic() - began)))
            self.changes.rest(every_s)

    def step(self, now: float) -> bool:
        """One pass: each job that isn't at rest takes one transition at most. Whether any did."""
        self._reconcile(now)
        self.store.nodes.begin_now(now)
        rows, version = self.store.tended.all()
        asked = self.store.controls.open()
        queued = [r for r in rows if r.state is JobState.QUEUED and not r.placement_group]
        seen = Seen(now, [row for row in rows if row.nodes], queued, asked, version)
        moved = False
        for row in rows:
            if row.state.holds_nodes:
                moved |= bool(self._turn(row, seen, self._tending.tend))
            elif row.state is not JobState.QUEUED or row.placement_group:
                # Also one that was resumed, or preempted, before what it held was given back.
                moved |= bool(self._turn(row, seen, self._tending.clear))
        moved |= self._admission.admit(seen)
        self._passed_at = self._clock()
        if moved:
            self.changes.notify()
        return moved

    def _reconcile(self, now: float) -> None:
        try:
            self.desk.reconcile(now)
        except Exception:
            logger.exception("what is held of the nodes could not be compared with the records")

    def _turn(self, row: JobRow, seen: Seen, act: Act) -> bool | None:
        """Whether the job moved; None: its turn failed, which is told when it is news."""
        try:
            moved = act(row, seen)
        except TransitionRefused:
            # It changed between the read and the write; the next pass sees how.
            return True
        except Exception as error:
            said = f"the controller can't go on with this job: {error}"
            if self._told.get(row.id) != said:
                self._told[row.id] = said
                logger.exception("job %s failed its turn", row.id)
                self.store.note(row.id, EventDraft("controller_error", seen.now, said, {}))
            return None
        self._told.pop(row.id, None)
        return moved
