"""What ranks report, and what follows from each report.

Promises: reports are read in the order in which they came; those of another attempt are refused;
a step is recorded once it is whole, and before anything is decided on it.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

from launch.commands import (
    BackendReport,
    CopyFailed,
    CopyRefused,
    DrillReport,
    ExchangeReport,
    RankReport,
    RestoredOlder,
    RingReport,
    RollbackReport,
    SnapshotReport,
)
from launch.step_part import StepPart
from monitoring.records import StepRecord
from orchestrator.lifecycle import Cause, JobState
from orchestrator.recovery.last_steps import out_of_reach
from orchestrator.recovery.policy import exchange_chosen
from orchestrator.supervision import notices
from orchestrator.supervision.attempt_starter import AttemptStarter
from orchestrator.supervision.control_room import ControlRoom
from orchestrator.supervision.decisions import Decisions
from orchestrator.supervision.inbox import Inbox
from orchestrator.supervision.job_in_hand import JobInHand
from orchestrator.supervision.phases import Phase
from orchestrator.supervision.record_merger import record_of
from orchestrator.supervision.stragglers import Slow, incident_of, slow_nodes

logger = logging.getLogger(__name__)


class ReportReader:
    """Of one job."""

    def __init__(
        self,
        job: JobInHand,
        inbox: Inbox,
        controls: ControlRoom,
        starter: AttemptStarter,
        decisions: Decisions,
    ) -> None:
        self._job = job
        self._inbox = inbox
        self._controls = controls
        self._starter = starter
        self._decisions = decisions
        self._slow_nodes: set[str] = set()
        """Whose replacement was tried."""

    def read(self, now: float) -> None:
        """Reports, in the order in which they came; others' attempts are refused."""
        job = self._job
        # Where the storage was away as the attempt began: its next checkpoint has a place again.
        # Once a pass, for a look at a storage that is away may take long.
        job.shelf.reopen()
        for step, failed in job.shelf.retry(job.attempt.facts.actions, now):
            job.journal.happened(notices.checkpoint(step, failed), now)
        for report in self._inbox.drain():
            attempt = job.attempt
            if job.phase is Phase.OVER or report.attempt != attempt.facts.attempt:
                continue
            attempt.heard = now
            match report:
                case RankReport() | StepPart():
                    self._controls.applied(report, now)
                    whole = attempt.merger.add(report)
                    if whole is None:
                        continue
                    self._record(record_of(whole), now)
                    slow = attempt.stragglers.add(whole)
                    if slow and attempt is job.attempt:
                        self._slow(slow, whole, now)
                case SnapshotReport(tier="ring"):
                    job.saves.sealed(report, now)
                    attempt.book.add(report, attempt.facts.timeline)
                case SnapshotReport(tier="disk"):
                    job.saves.written(report, now)
                    if job.shelf.add(report, actions := attempt.facts.actions):
                        answer = job.shelf.commit_in_time(report, actions, now)
                        if answer is not None:
                            job.journal.happened(notices.checkpoint(report.step, answer), now)
                    job.tell_rolled_back(now)
                case SnapshotReport():
                    if attempt.copies.add(report):
                        job.group.settle(attempt.replicas)
                        job.journal.happened(notices.replicated(report.step, attempt), now)
                case RollbackReport():
                    logger.debug("rank %d is back at step %d", report.rank, report.step)
                case DrillReport():
                    if report.drill not in attempt.facts.fired_drills:
                        kind = job.spec.drills[report.drill].kind
                        job.journal.happened(notices.drill(report, kind), now)
                    attempt.facts.fired_drills.add(report.drill)
                case CopyFailed():
                    job.shelf.lose(report)
                    job.copy_troubles.add(report, now)
                case CopyRefused():
                    job.starts.passed_over(report)
                    job.copy_troubles.add(report, now)
                case RestoredOlder(point=point) if point != attempt.restore:
                    # Told again, steps later, it would have the detectors forget those.
                    self._starter.restored_older(report, now)
                case RingReport():
                    if attempt.book.made_smaller(report.kept):
                        told = notices.fewer_snapshots(report, job.spec.snapshots.keep)
                        job.journal.happened(told, now)
                case BackendReport(choice=choice):
                    job.journal.chosen(choice, now)
                case ExchangeReport():
                    self._exchange_chosen(report, now)
        job.tell(job.copy_troubles.due(now, job.world))

    def _record(self, record: StepRecord, now: float) -> None:
        job = self._job
        attempt = job.attempt
        first = not attempt.trains
        attempt.record(record, now)
        incidents = job.bank.observe(record)
        due = record.step % job.spec.snapshots.every == 0
        steps = job.spec.training.steps
        ended = bool(incidents) and out_of_reach(record.step, steps, job.group.ended())
        trains = job.phase is Phase.TRAINING
        context = attempt.context(record, decides=trains, ended=ended)
        job.journal.recorded(record, job.bank.state_dict() if due else None, context)
        self._followed(record, first, now)
        if incidents:
            attempt.book.unhealthy(record.step)
            if job.phase is Phase.TRAINING:
                self._decisions.decide(incidents, now, in_memory=not ended)
        else:
            attempt.book.healthy(record.step)
            self._decisions.calm(now)

    def _followed(self, record: StepRecord, first: bool, now: float) -> None:
        """Says so when a step is the first one after a start or a way back."""
        job = self._job
        way, job.way_back = job.way_back, None
        told = [notices.training(record.attempt, record.step)] if first else []
        if way is not None:
            told.append(notices.recovered(way, record.time, record.step))
        cause = Cause.FIRST_STEP if first else Cause.RECOVERED
        for notice in told:
            last = notice is told[-1]
            job.journal.happened(notice, now, (JobState.RUNNING, cause) if last else None)
        if first:
            self._controls.trains(record.step, now)

    def _slow(self, slow: Sequence[Slow], step: StepPart, now: float) -> None:
        """Ranks hold up the others: told, and their node replaced where the spec says so, once."""
        job = self._job
        nodes = job.attempt.resume.nodes
        incident, where = incident_of(slow, nodes, step, now), slow_nodes(slow, nodes)
        job.journal.happened(notices.slow_ranks(incident, where), now)
        new = set(where) - self._slow_nodes
        if new and job.spec.recovery.replace_slow_nodes and job.takes_commands():
            # Where there is no other node it comes back: that one is not tried again.
            self._slow_nodes |= new
            self._decisions.decide([incident], now)

    def _exchange_chosen(self, report: ExchangeReport, now: float) -> None:
        """A measurement is the job's where there is none, or a person asked for one.

        It is durable before any step that was made with it.
        """
        job = self._job
        facts = job.attempt.facts
        if facts.exchange is not None and not self._controls.measures:
            return
        history = facts.history(now, job.attempt.book.restorable())
        action = exchange_chosen(history, report.dtype, report.reason)
        job.decided(action)
        job.journal.configured({"exchange": report.dtype, "exchange_reason": report.reason})
        facts.apply(action)
        self._controls.measured(report, action.reason, now)
