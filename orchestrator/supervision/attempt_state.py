"""What a supervisor keeps of the attempt that runs. No I/O; time is an argument."""

from __future__ import annotations

from collections import deque

from launch.commands import Command, Order, RestorePoint, Rollback
from monitoring.records import Incident, StepRecord
from orchestrator.actions import Action
from orchestrator.protocol import ResumeState, StepContext
from orchestrator.recovery.job_facts import JobFacts
from orchestrator.recovery.last_steps import UnderWay
from orchestrator.recovery.restart_budget import rest_before_s
from orchestrator.saved.copy_book import CopyBook
from orchestrator.saved.snapshot_book import SnapshotBook
from orchestrator.supervision.attempt import step_timeout_s
from orchestrator.supervision.lost_ranks import hung
from orchestrator.supervision.record_merger import RecordMerger
from orchestrator.supervision.stragglers import Stragglers


class AttemptState:
    """Steps, snapshots and commands of one attempt."""

    def __init__(self, resume: ResumeState, world_size: int, now: float) -> None:
        self.resume = resume
        self.facts = JobFacts(resume)
        self.merger = RecordMerger(resume.attempt, resume.timeline, world_size)
        self.book = SnapshotBook(resume.spec.snapshots, resume.attempt, world_size)
        self.copies = CopyBook(world_size, self.replicas)
        self.stragglers = Stragglers(resume.spec, resume.spec.detection, world_size)
        self.restore: RestorePoint | None = None
        """What it started from; None: the seed."""
        self.fallbacks: tuple[RestorePoint, ...] = ()
        """What its ranks may start from instead, best first."""
        self.step_times: deque[float] = deque(maxlen=256)
        """Seconds of the newest steps; empty before the attempt's first."""
        self.ended_since: float | None = None
        """When a rank was first seen to have ended."""
        self.heard = now
        """When the newest report of its ranks was read."""
        self.under_way: UnderWay | None = None
        self.rests_until = now + rest_before_s(resume.actions, resume.attempt, resume.step)
        """Before, its ranks don't start: what ended the attempt before may pass."""
        self._policy = resume.spec.recovery
        self._commands = 0
        self._started = self.rests_until
        self._progress = self.rests_until

    @property
    def replicas(self) -> int:
        """Other nodes that hold a copy of each snapshot."""
        return min(self.resume.spec.snapshots.replicas or 0, len(self.resume.nodes) - 1)

    @property
    def trains(self) -> bool:
        """Whether it has done a step."""
        return bool(self.step_times)

    @property
    def on_new_ground(self) -> bool:
        """Whether it has done a step that no attempt before it had recorded."""
        return self.trains and self.facts.step > self.resume.step

    def record(self, record: StepRecord, now: float) -> None:
        """A step is complete."""
        self.facts.record(record)
        self.step_times.append(record.step_time_s)
        self.under_way = None
        self._progress = now

    def context(self, record: StepRecord, *, decides: bool, ended: bool) -> StepContext:
        """What is known beside ``record``; asked once a record, before anything is decided."""
        place = (record.attempt, record.timeline, record.step)
        return StepContext(*place, self.book.news(), decides, ended)

    def command(self, order: Order) -> Command:
        """The order with its number."""
        self._commands += 1
        return Command(self.facts.attempt, self._commands, order)

    def go_back(self, action: Action, now: float) -> Rollback:
        """Enter the timeline that a stored action began; returns the order for the ranks."""
        assert action.to_step is not None
        timeline = self.facts.timeline
        self.merger.begin(timeline)
        self.book.rolled_back(action.to_step)
        self._progress = now
        return Rollback(
            to_step=action.to_step,
            timeline=timeline,
            skip_batches=action.skip_batches,
            precision=self.facts.whole_precision() or None,
            lr_scale=action.lr_scale,
        )

    def ranks_begin(self, now: float) -> None:
        """They have been given out: what they have to do counts from here."""
        self._progress = now

    def held_up(self, seconds: float) -> None:
        """What its start took of the supervisor itself, for a disk or the store, is no time of the
        ranks."""
        self._started += seconds

    def step_limit_s(self) -> float:
        """Seconds that the next step may take."""
        return step_timeout_s(self._policy, self.step_times)

    def overdue(self, now: float, end_s: float) -> Incident | None:
        """The incident of a first or next step that is late; ``end_s``: what the ranks may take to
        end once they have done the last one."""
        if self.facts.step + 1 >= self.resume.spec.training.steps:
            what, since, limit = "end", self._progress, end_s
        elif self.trains:
            what, since, limit = "new step", self._progress, self.step_limit_s()
        else:
            what, since, limit = "first step", self._started, self._policy.init_timeout_s
        if now - since <= limit:
            return None
        return hung(self.merger.waiting_for(), now - since, self.facts, now, what)
