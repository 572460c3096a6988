"""How an attempt comes about: its workers, its nodes' preflight, where it starts, its ranks.

Promises: an attempt is allocated before anything of it starts, and the one before is ended before
that; ranks are given out once all workers are there and their nodes have passed; what has trained
never begins from the seed because nobody said in time what is left of it, keeper or storage, nor
from far back where a short wait may spare it that.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from launch.commands import RestoredOlder
from launch.rank_group import NodeSilentError, RankEnd
from monitoring.environment import environment
from monitoring.records import Incident
from orchestrator.events import Notice
from orchestrator.lifecycle import Cause, JobState
from orchestrator.protocol import ControllerPort, ResumeState
from orchestrator.recovery.detector_bank import new_bank
from orchestrator.saved.checkpoint_facts import facts_of
from orchestrator.spec.backend import backend_of
from orchestrator.spec.degrees import other_degrees
from orchestrator.supervision import notices
from orchestrator.supervision.attempt import assignments, seats, world_size
from orchestrator.supervision.attempt_state import AttemptState
from orchestrator.supervision.awaited_state import AwaitedState
from orchestrator.supervision.control_room import ControlRoom
from orchestrator.supervision.job_end import JobEnd
from orchestrator.supervision.job_in_hand import JobInHand
from orchestrator.supervision.lost_ranks import died, not_begun, unmet
from orchestrator.supervision.outbox import ControllerUnreachableError
from orchestrator.supervision.phases import Launching, Training
from orchestrator.supervision.preflight_gate import Look, PreflightGate
from orchestrator.supervision.restocking import Restocking
from orchestrator.supervision.starting_points import newest_own

logger = logging.getLogger(__name__)


class AttemptStarter:
    """The starts of one job's attempts."""

    def __init__(
        self,
        job: JobInHand,
        controller: ControllerPort,
        controls: ControlRoom,
        end: JobEnd,
        restocking: Restocking,
        gate: PreflightGate | None,
        sleep: Callable[[float], None],
    ) -> None:
        """``gate``: None lets every node pass."""
        self._job = job
        self._controller = controller
        self._controls = controls
        self._end = end
        self._restocking = restocking
        self._gate = gate
        self._sleep = sleep
        self._awaited = AwaitedState(job)

    def first(self) -> None:
        """Start the workers of the attempt that the supervisor was started for."""
        self._start_workers(self._job.attempt.resume)

    def next(self, reason: str) -> None:
        """End the ranks and start the next attempt."""
        job = self._job
        self._controls.over()
        job.group.kill()
        job.tell(job.copy_troubles.rest())
        job.journal.flush()
        while True:
            try:
                over = job.attempt.resume
                resume = self._controller.next_attempt(over.job, over.attempt, reason)
                break
            except ControllerUnreachableError as error:
                logger.warning("no next attempt yet: %s", error)
                self._sleep(0.5)
        job.journal.begin(resume.attempt)
        job.shelf.forget()
        now = job.clock()
        self._resize(resume, now)
        if self._gate is not None:
            self._gate.keep_to(resume.nodes)
            if unmet(resume.actions):
                self._gate.look_again()
        before = job.attempt.facts
        job.attempt = AttemptState(resume, job.world, now)
        job.attempt.facts.fired_drills |= before.fired_drills
        job.attempt.facts.fp8_layers = before.fp8_layers
        job.attempt.facts.fixed_layers = before.fixed_layers
        job.standing = Launching()
        self._start_workers(resume)

    def _resize(self, resume: ResumeState, now: float) -> None:
        """With resources.min_nodes the next attempt may have more or fewer ranks."""
        job = self._job
        world = world_size(resume)
        if world == job.world:
            return
        job.spec, job.world = resume.spec, world
        job.shelf.resize(world, facts_of(resume.spec))
        job.starts.resize(world, resume.attempt)
        draft = other_degrees(resume.spec, now)
        job.journal.happened(Notice(draft.kind, draft.message, dict(draft.detail)), now)

    def launch(self, now: float) -> Incident | None:
        """Give the ranks out once all workers are there; the incident of nodes that are gone, or
        that failed preflight."""
        job, attempt = self._job, self._job.attempt
        # Before the nodes are looked at: what attempts before left behind may be what fills the
        # disk, and nothing else would ever give that space back.
        job.shelf.take_over(attempt.facts.attempt)
        if not job.group.ready():
            return None
        looked = job.clock()
        look = Look(True) if self._gate is None else self._gate.look(attempt.resume, looked)
        if look.notice is not None:
            job.journal.happened(look.notice, looked)
            if not look.passed:
                # The ladder answers: where this job fails on any node, others are no end of it.
                return not_begun(look.notice.message, attempt.facts, looked)
        if not look.passed:
            return None
        if job.clock() < attempt.rests_until:
            return None
        try:
            master = job.group.master()
        except NodeSilentError as error:
            return died([RankEnd(0, "lost", error=str(error))], attempt.facts, now)
        if self._awaited.rests(now):
            return None
        asked = job.clock()
        points = job.starts.choose(attempt)
        if self._awaited.holds_up(points, asked, now):
            return None
        for folder, why in job.starts.left_out():
            job.journal.happened(notices.checkpoint_left_out(folder.name, why), now)
        lost = job.starts.lost(points, job.journal.newest_checkpoint())
        if attempt.resume.step >= 0 and newest_own(points) is None:
            lost = job.shelf.unseen or lost
        if lost:
            told = notices.nothing_to_start_from(lost)
            self._end.finish(JobState.PAUSED, Cause.STATE_GONE, told)
            return None
        if (taken_over := job.starts.take_over(attempt, now)) is not None:
            job.decided(taken_over)
            attempt.facts.apply(taken_over)
        self.starts_at(points[0].step if points else 0, now)
        job.group.run(assignments(attempt.resume, attempt.facts, points, master))
        attempt.ranks_begin(job.clock())
        job.standing = Training()
        started = notices.attempt_started(
            attempt.facts.attempt,
            job.world,
            attempt.restore,
            backend_of(job.spec),
            environment(),
        )
        job.journal.happened(started, job.clock())
        return None

    def starts_at(self, start: int, now: float) -> None:
        """Bring the detectors to the step that the attempt starts at."""
        job = self._job
        recorded = job.attempt.facts.step
        if start > recorded + 1:
            # A trend drawn across steps that nobody saw would make a healthy loss a spike.
            job.bank = new_bank(job.spec)
            job.journal.happened(notices.unrecorded(recorded + 1, start - 1), now)
        job.bank.rewind(start)

    def restored_older(self, report: RestoredOlder, now: float) -> None:
        """The ranks had no common copy of what they were to start from."""
        job = self._job
        wanted, job.attempt.restore = job.attempt.restore, report.point
        self.starts_at(report.step, now)
        told = notices.restored_older(report, wanted.step if wanted else 0)
        job.journal.happened(told, now)

    def _start_workers(self, resume: ResumeState) -> None:
        self._restocking.begin(resume)
        self._job.group.start(seats(resume))
