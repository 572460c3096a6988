"""The controller: takes jobs in, gives them nodes, and moves each one transition a pass.

``step`` reads the store, dispatches by state and lets each job take its turn; a job that
raises is logged and the next one goes on. All that must survive is in the store, so a
controller can be killed anywhere and the next one carries on. Time is an argument of
``step``; nodes and supervisors come through interfaces.
"""

from __future__ import annotations

import logging
import os
import secrets
import shutil
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from monitoring.prometheus import Numbers
from orchestrator.controller.lost_supervisor import supervisor_lost
from orchestrator.controller.preemption import Preemption
from orchestrator.controller.supervisors import LastWords, Presence, Supervisors
from orchestrator.controller.webhooks import check_webhook
from orchestrator.events import EventDraft
from orchestrator.lifecycle import Cause, JobState, TransitionRefused
from orchestrator.nodes.desk import NodeDesk, Sight
from orchestrator.nodes.groups import NodeGroups
from orchestrator.nodes.rescue import Rescue
from orchestrator.nodes.roll import NodeRoll
from orchestrator.placement.fair_queue import turns
from orchestrator.protocol import Acknowledgement, JobHistory, ResumeState, SupervisorBatch
from orchestrator.recovery.controls import STOPS, Control, in_vain, refused_at_once
from orchestrator.saved.resume_from import check_resume_from
from orchestrator.spec.config import QuarantineConfig
from orchestrator.spec.degrees import Word, as_asked, other_degrees
from orchestrator.spec.errors import Source
from orchestrator.spec.job import JobSpec, spec_of, spec_yaml
from orchestrator.spec.storage import check_storage, no_job_directory
from orchestrator.spec.trial import check_factory_model
from orchestrator.store.controls import ControlRefusedError, ControlRow
from orchestrator.store.database import Store
from orchestrator.store.rows import JobRow
from orchestrator.supervision.ending import end_of
from orchestrator.supervision.notices import decided, ladder_renewed, seen

logger = logging.getLogger(__name__)

CANCEL_GRACE_S = 60.0
"""Seconds that a cancelled job has for its last checkpoint."""
FINISH_GRACE_S = 60.0
"""Seconds that a supervisor has after the job's end for the report and W&B."""
REST = 4.0
"""Times as long as a pass took that the next one waits at least where no job moved in it: clients
who submit many jobs are answered first."""
ITS_TURN = "waits its turn in the queue"
"""Why a job waits that others come before; behind whom is in ``Controller.reason_of``. One text,
whoever is first: with another one for each, ten thousand rows would be written whenever a job
starts."""


class NoNodesError(RuntimeError):
    """The nodes of a job are gone and no others are free. Its supervisor ends; the controller
    starts another one when there are nodes.
    """


class SubmitConflictError(ValueError):
    """The key was used to submit another job."""

    def __init__(self, key: str, job: str) -> None:
        super().__init__(key, job)
        self.key, self.job = key, job

    def __str__(self) -> str:
        return f"the key {self.key!r} was used to submit another job, {self.job}: take a new one"


def _same_job(known: JobRow, spec: JobSpec, key: str) -> JobRow:
    if known.spec != spec:
        raise SubmitConflictError(key, known.id)
    return known


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
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.store = store
        self.desk = NodeDesk(store, groups, quarantine, fixed=fixed_cluster)
        self.roll = NodeRoll(store, groups)
        self._rescue = Rescue(store, groups, clock, self._notify)
        self._preemption = Preemption(store, self.desk)
        self._supervisors = supervisors
        self._jobs_dir = jobs_dir
        self._fixed = fixed_cluster
        self._clock = clock
        self._changed = threading.Condition()
        self._changes = 0
        self._wake = threading.Event()
        # When a wait of this process began, by (job, what). A restart begins it anew.
        self._since: dict[tuple[str, str], float] = {}
        self._stops: set[str] = set()
        self._told: dict[str, str] = {}
        self._open: dict[str, list[Control]] = {}
        self._holding: list[JobRow] = []
        """Jobs that held nodes when the pass began."""
        self._ahead = ""
        """The job that holds up those behind it."""
        self._passed_at: float | None = None
        self._admitted: object = None
        """All that the last look at the queue depended on, where it led to nothing."""

    # -- what clients ask

    def validate(self, data: Mapping[str, Any], file: str) -> JobSpec:
        """The completed spec; raises ``SpecError``."""
        spec = spec_of(Source(file, dict(data), {}))
        check_storage(spec.checkpoint.storage_path or self._jobs_dir, file)
        check_factory_model(spec, file)
        check_webhook(spec, file, os.environ)
        check_resume_from(spec, file)
        return spec

    def submit(
        self, data: Mapping[str, Any], file: str, *, by: str = "", key: str | None = None
    ) -> JobRow:
        """Take a job in: checked, its directory made, stored. Raises ``SpecError``.

        ``by``: whose turn in the queue it takes; ``key``: theirs, under which the same job
        is taken once however often it comes. ``SubmitConflictError`` for another job under it.
        """
        spec = self.validate(data, file)
        if key and (known := self.store.job_of_key(key, by)) is not None:
            return _same_job(known, spec, key)
        job = f"{spec.name}-{secrets.token_hex(3)}"
        folder = (spec.checkpoint.storage_path or self._jobs_dir).absolute() / job
        try:
            (folder / "logs").mkdir(parents=True)
            (folder / "spec.yaml").write_text(spec_yaml(spec))
        except OSError as error:
            raise no_job_directory(folder.parent, file, error) from None
        stored = self.store.add_job(job, spec, str(folder), file, self._clock(), by=by, key=key)
        if stored != job:
            # It came twice at the same time.
            shutil.rmtree(folder, ignore_errors=True)
            return _same_job(self.store.job(stored), spec, key or "")
        self._notify()
        return self.store.job(job)

    def cancel(self, job: str, reason: str) -> JobRow:
        """Ask for a job's end; one that is being cancelled already stays so.

        Raises ``TransitionRefused`` when it has ended.
        """
        if self.store.job(job).state is not JobState.CANCELLING:
            self.store.change(job, Cause.CANCEL_ASKED, reason, self._clock())
            self._notify()
        return self.store.job(job)

    def resume(self, job: str, reason: str, degrees: Mapping[Word, int] | None = None) -> JobRow:
        """Queue a paused, cancelled or failed job again; else ``TransitionRefused``.

        What was asked of it meanwhile is done first, and a ladder that gave up begins anew. Its
        next attempt starts from the newest state that was saved, on any ``degrees``: those
        given replace the job's own. Raises ``SpecError`` for what it can't be split into.
        """
        now = self._clock()
        if degrees:
            before = self.store.job(job)
            asked = Source(f"{job} --parallelism", as_asked(before.spec, degrees), {})
            spec = spec_of(asked)
            check_factory_model(spec, asked.file)
            self.store.resume_as(job, spec, reason, other_degrees(spec, now), now)
            (Path(before.job_dir) / "spec.yaml").write_text(spec_yaml(spec))
        else:
            self.store.change(job, Cause.RESUME_ASKED, reason, now)
        if (told := ladder_renewed(self.store.past.actions(job))) is not None:
            self.store.note(job, EventDraft(told.kind, now, told.message, told.detail))
        self._notify()
        return self.store.job(job)

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
        self._notify()
        return asked

    def numbers(self) -> Numbers:
        """What Prometheus scrapes."""
        return replace(self.store.numbers(self._clock()), passed_at=self._passed_at)

    def changes(self) -> int:
        """How often something was stored in this process' life."""
        return self._changes

    def wait_for_change(self, seen: int, timeout_s: float) -> int:
        """Block until something was stored after ``seen``, or the time is over; the new count."""
        with self._changed:
            self._changed.wait_for(lambda: self._changes != seen, timeout_s)
            return self._changes

    # -- what supervisors ask (ControllerPort)

    def next_attempt(self, job: str, attempt: int, reason: str) -> ResumeState:
        """Allocate the attempt after ``attempt``, on its nodes or those that stand in for them."""
        row = self.store.job(job)
        if row.attempt == attempt and (missing := self._mend(row)):
            raise NoNodesError(f"{job} {missing}")
        resume = self.store.attempts.begin(job, reason, self._clock(), after=attempt)
        self._notify()
        return resume

    def history(self, job: str) -> JobHistory:
        """All that is stored of a job's past."""
        return self.store.past.history(job)

    def report(self, job: str, attempt: int, batch: SupervisorBatch) -> Acknowledgement:
        """Store a batch in one transaction."""
        answer = self.store.attempts.record(job, attempt, batch, self._clock())
        if not answer.accepted:
            logger.warning("refused batch %d of %s: %s", batch.sequence, job, answer.reason)
        self._notify(wake=batch.transition is not None)
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
            self._wake.wait(every_s)
            self._wake.clear()

    def step(self, now: float) -> bool:
        """One pass: each job that isn't at rest takes one transition at most. Whether any did."""
        rows, version = self.store.tended.all()
        self._open = self.store.controls.open()
        self._holding = [r for r in rows if r.nodes]
        moved = False
        for row in rows:
            if row.state.holds_nodes:
                moved |= bool(self._turn(row, now, self._tend))
            elif row.state is not JobState.QUEUED or row.placement_group:
                # Also one that was resumed, or preempted, before what it held was given back.
                moved |= bool(self._turn(row, now, self._clear))
        queued = [r for r in rows if r.state is JobState.QUEUED and not r.placement_group]
        moved |= self._admit(queued, self._holding, now, version)
        self._passed_at = self._clock()
        if moved:
            self._notify()
        return moved

    def _turn(self, row: JobRow, now: float, act: Callable[[JobRow, float], bool]) -> bool | None:
        """Whether the job moved; None: its turn failed, which is told when it is news."""
        try:
            moved = act(row, now)
        except TransitionRefused:
            # It changed between the read and the write; the next pass sees how.
            return True
        except Exception as error:
            said = f"the controller can't go on with this job: {error}"
            if self._told.get(row.id) != said:
                self._told[row.id] = said
                logger.exception("job %s failed its turn", row.id)
                self.store.note(row.id, EventDraft("controller_error", now, said, {}))
            return None
        self._told.pop(row.id, None)
        return moved

    def _admit(self, queued: list[JobRow], holding: list[JobRow], now: float, version: int) -> bool:
        """Give nodes to the first in the queue; who can't have them yet holds up the rest, and
        lower priorities make room for the first of these. ``version``: of what the pass has read,
        with which nothing comes of the queue that came of it before."""
        # One look for all of them: a queue may be long.
        sight = self.desk.sight(now)
        depends = (version, sight.told(), self._open, self.desk.short)
        if queued and depends == self._admitted:
            return False
        self._admitted = None
        first = turns(
            (row.ticket for row in queued),
            (row.ticket for row in holding),
            self.store.served_at() if queued else {},
        )
        rows = {row.id: row for row in queued}
        ahead = ""
        waiting: list[JobRow] = []
        failed = False
        while rows and not ahead:
            row = rows.pop(next(first).job)
            admitted = self._turn(row, now, partial(self._admit_one, sight=sight, holding=holding))
            if admitted:
                # The next pass sees what is left.
                self.desk.wish(waiting, holding, now)
                return True
            failed |= admitted is None
            if admitted is not None:
                waiting.append(row)
                ahead = row.id if sight.fit(row).ever else ""
        self._ahead = ahead
        # Of those behind it nobody's place matters, but what can never fit holds up nobody.
        behind: list[JobRow] = []
        for row in rows.values():
            if sight.fit(row).ever:
                behind.append(row)
                continue
            act = partial(self._admit_one, sight=sight, holding=())
            admitted = self._turn(row, now, act)
            if admitted:
                self.desk.wish(waiting, holding, now)
                return True
            failed |= admitted is None
            if admitted is not None:
                waiting.append(row)
        new = [row.id for row in behind if row.reason != ITS_TURN]
        if new:
            self.store.wait_all(new, ITS_TURN, f"waits behind {ahead}", now)
            self._notify(wake=False)
        self.desk.wish(waiting, holding, now)
        if queued and not failed:
            self._admitted = depends
        return False

    def reason_of(self, row: JobRow) -> str:
        """``row.reason``, and behind which job one waits that waits its turn."""
        if row.reason == ITS_TURN and row.state is JobState.QUEUED and self._ahead:
            return f"waits behind {self._ahead}"
        return row.reason

    def _admit_one(self, row: JobRow, now: float, sight: Sight, holding: Sequence[JobRow]) -> bool:
        answer = sight.fit(row)
        # One that ran before did fit: what is missing was lost, and may come back.
        if not answer.ever and self._fixed and row.attempt == 0:
            self.store.change(row.id, Cause.CAN_NEVER_FIT, f"can never fit: {answer.reason}", now)
            return True
        missing = answer.reason or self.desk.admit(row, now)
        if not missing:
            return True
        room = ""
        if answer.ever:
            room = self._preemption.make_room(row, holding, self._open, sight)
        return self._wait(row, now, f"{missing}; {room}" if room else missing)

    def _wait(self, row: JobRow, now: float, reason: str) -> bool:
        if row.reason != reason:
            self.store.wait(row.id, reason, now)
            self._notify(wake=False)
        return False

    def _tend(self, row: JobRow, now: float) -> bool:
        """A job that holds nodes: it has a supervisor, or gets one."""
        presence = self._supervisors.look(row.id, now)
        if row.state is JobState.CANCELLING:
            return self._tend_cancelling(row, presence, now)
        if presence is Presence.WORKING:
            if row.id in self._open:
                # Until it has answered: whichever supervisor has the job gets to know.
                self._supervisors.control(row.id, self._open[row.id])
            self.desk.leave(row)
            self.desk.keep_up(row, now)
            self._preemption.let_grow(row, now)
            spares = self.desk.fill(row, now)
            if spares is not None:
                self._supervisors.spares(row.id, spares)
            return False
        if presence is Presence.DONE:
            words = self._supervisors.last_words(row.id)
            self._supervisors.kill(row.id)
            # What it told last may have come since the pass began.
            if self.store.job(row.id).state is not row.state:
                return True
            return self._lost(row, now, words)
        if row.state is JobState.RUNNING:
            return self._lost(row, now, LastWords())
        if self._mend(row, holding=self._holding):
            return self._stop_without_ranks(row, now)
        why = "first start" if row.attempt == 0 else row.reason or "supervisor lost"
        self._supervisors.start(self.store.attempts.begin(row.id, why, now))
        return True

    def _stop_without_ranks(self, row: JobRow, now: float) -> bool:
        """A job whose nodes are gone has no ranks that could stop: its state is what is on disk,
        and what the nodes that are left hold, which ``_clear`` sees to."""
        asked = [c for c in self._open.get(row.id, ()) if c.kind in STOPS]
        if asked:
            _, cause = end_of(asked[0])
            told = f"{cause.value} by {asked[0].by} while it waited for nodes"
            self.store.change(row.id, cause, told.replace("pause asked", "paused"), now)
        return bool(asked)

    def _lost(self, row: JobRow, now: float, words: LastWords) -> bool:
        """Store the loss and its answer; the next pass starts the next attempt, if there is one."""
        waits = words.raised and words.told.startswith(NoNodesError.__name__)
        action = None
        if not waits:
            action = supervisor_lost(row, self.store.past.actions(row.id), now, words)
        if action is None:
            told = "the supervisor was lost after it had decided on the next attempt"
            if waits:
                told = words.told.removeprefix(f"{NoNodesError.__name__}: ")
            self.store.change(row.id, Cause.SUPERVISOR_LOST, told, now)
            return True
        incident = action.incidents[0]
        notices = (seen(incident), decided(action))
        transition = {
            "pause": (JobState.PAUSED, Cause.BUDGET_SPENT),
            "fail": (JobState.FAILED, Cause.ERROR),
        }.get(action.kind, (JobState.RECOVERING, Cause.SUPERVISOR_LOST))
        batch = SupervisorBatch(
            sequence=0,
            events=tuple(EventDraft(n.kind, now, n.message, n.detail) for n in notices),
            incidents=(incident.to_json(),),
            actions=(action,),
            transition=transition,
        )
        self.store.attempts.decide(row.id, batch, now)
        return True

    def _tend_cancelling(self, row: JobRow, presence: Presence, now: float) -> bool:
        if presence is not Presence.WORKING:
            self._supervisors.kill(row.id)
            if self.store.job(row.id).state is JobState.CANCELLING:
                self.store.change(row.id, Cause.ENDED, row.reason, now)
            return True
        if row.id not in self._stops:
            self._stops.add(row.id)
            self._supervisors.stop(row.id, row.reason)
        if self._waited((row.id, "cancel"), now) > CANCEL_GRACE_S:
            self._supervisors.kill(row.id)
            reason = f"{row.reason}; the ranks didn't end within {CANCEL_GRACE_S:.0f} s"
            self.store.change(row.id, Cause.ENDED, reason, now)
            return True
        return False

    def _clear(self, row: JobRow, now: float) -> bool:
        """A job that has ended or is paused: its nodes go back when its supervisor is done, and
        nothing that should not be lost is in their memory alone."""
        presence = self._supervisors.look(row.id, now)
        working = presence is Presence.WORKING
        if working and self._waited((row.id, "finish"), now) <= FINISH_GRACE_S:
            return False
        self._supervisors.kill(row.id)
        if not self._rescue.over(row):
            return False
        self.desk.release(row)
        self._stops.discard(row.id)
        self._since = {k: t for k, t in self._since.items() if k[0] != row.id}
        return True

    def _mend(self, row: JobRow, holding: Sequence[JobRow] = ()) -> str:
        """See to it that every rank has a node; else what it waits for, which is told: of those
        that are ``holding`` nodes, less important ones make room."""
        now = self._clock()
        missing = self.desk.mend(row, now)
        if missing:
            others = [other for other in holding if other.id != row.id]
            room = ""
            if any(other.priority < row.priority for other in others):
                sight = self.desk.sight(now)
                room = self._preemption.make_room(row, others, self._open, sight)
            self._wait(row, now, f"{missing}; {room}" if room else missing)
        return missing

    def _waited(self, key: tuple[str, str], now: float) -> float:
        return now - self._since.setdefault(key, now)

    def _notify(self, *, wake: bool = True) -> None:
        with self._changed:
            self._changes += 1
            self._changed.notify_all()
        if wake:
            self._wake.set()
