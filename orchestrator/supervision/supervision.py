"""The supervisor's loop over one job, without Ray: reports in, decisions out, one pass a call.

A pass (``step``) reads what the ranks reported (``report_reader``), then turns to what people
asked (``control_room``), then looks at what ended, then at what is late. What becomes of it is
decided and carried out in ``decisions``; ``attempt_starter`` starts attempts, ``job_end`` ends the
job, and ``job_in_hand`` is what they all have of it. Promises: a pass never waits for a rank; when
the controller refuses us, the ranks are ended and nothing is written any more; what is given time
is given all of it, however long a pass waits for the store or the disk: time begins by the clock
when the wait is over, and is over by ``now``, which was read before the ranks' reports were; a wall
clock that is set makes nothing late (``orchestrator.instant``).
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from launch.commands import Order
from launch.rank_group import RankGroup
from launch.step_part import Sent
from orchestrator.actions import Action
from orchestrator.instant import Instant
from orchestrator.lifecycle import Cause, JobState
from orchestrator.protocol import ControllerPort, FencedError, JobHistory, ResumeState
from orchestrator.recovery.controls import Control
from orchestrator.recovery.last_steps import missed, overwritten
from orchestrator.recovery.rungs import drafted
from orchestrator.supervision import notices
from orchestrator.supervision.attempt_starter import AttemptStarter
from orchestrator.supervision.attempt_state import AttemptState
from orchestrator.supervision.control_room import ControlRoom
from orchestrator.supervision.decisions import Decisions
from orchestrator.supervision.ending import Ending, end_of
from orchestrator.supervision.hang_report import explained
from orchestrator.supervision.inbox import Inbox
from orchestrator.supervision.job_end import JobEnd
from orchestrator.supervision.job_in_hand import JobInHand
from orchestrator.supervision.journal import Journal, RunLog
from orchestrator.supervision.lost_ranks import blames_a_peer, died, first_causes
from orchestrator.supervision.outbox import Outbox
from orchestrator.supervision.phases import Launching, Over, Phase, Stopping, Training
from orchestrator.supervision.preflight_gate import PreflightGate
from orchestrator.supervision.report_reader import ReportReader
from orchestrator.supervision.restocking import Restocking

logger = logging.getLogger(__name__)

BLAME_S = 0.5
"""Seconds that errors of ranks wait for the news of a dead peer that would explain them."""
NODE_BLAME_S = 2.5
"""The same for errors that say that a peer is gone. The news that a node died takes Ray a second
(``orchestrator.cluster.on_ray``), and before it nobody could give the ranks to another one."""


class Supervision:
    """One job from one ``ResumeState`` to its end, over as many attempts as that takes."""

    def __init__(
        self,
        resume: ResumeState,
        controller: ControllerPort,
        group: RankGroup,
        *,
        clock: Callable[[], float] = Instant.now,
        run_log: RunLog | None = None,
        history: JobHistory | None = None,
        sleep: Callable[[float], None] = time.sleep,
        gate: PreflightGate | None = None,
    ) -> None:
        """Starts the workers of the first attempt; ``gate``: None lets every node pass."""
        self.inbox = Inbox()
        outbox = Outbox(controller, resume.job, resume.attempt)
        self._journal = Journal(resume, outbox, run_log, history)
        if history is not None and history.unread:
            self._journal.happened(notices.past_unread(history.unread), clock())
        self._job = JobInHand(resume, group, self._journal, clock)
        self._controls = ControlRoom(resume.spec, resume.actions, self._journal, self)
        self.restocking = Restocking(group, resume.spec.resources.standby)
        self._end = JobEnd(self._job, self.inbox)
        self._starter = AttemptStarter(
            self._job, controller, self._controls, self._end, self.restocking, gate, sleep
        )
        self._decisions = Decisions(self._job, self._starter, self._end)
        self._reader = ReportReader(
            self._job, self.inbox, self._controls, self._starter, self._decisions
        )
        self._stop_reason: str | None = None
        self._starter.first()

    @property
    def phase(self) -> Phase:
        """Where the attempt stands."""
        return self._job.phase

    # What other threads call.

    def deliver(self, reports: Sequence[Sent]) -> None:
        """Take in reports of the ranks, those of a step merged or not."""
        self.inbox.put(reports)

    def ask_stop(self, reason: str) -> None:
        """Stop at the next pass."""
        self._stop_reason = reason
        self.inbox.wake()

    def ask(self, controls: Sequence[Control]) -> None:
        """What people ask for; the same ones may come again until they are answered."""
        if self._controls.offer(controls):
            self.inbox.wake()

    def status(self) -> dict[str, object]:
        """Where the job stands, for whoever asks."""
        job = self._job
        facts = job.attempt.facts
        return {
            "phase": job.phase.value,
            "attempt": facts.attempt,
            "timeline": facts.timeline,
            "step": facts.step,
            "restorable": [(r.step, r.certified) for r in job.attempt.book.restorable()],
            "high_precision_layers": sorted(facts.precision),
            "exchange": facts.exchange,
            "held_step": job.attempt.copies.complete,
            "keeper_bytes": dict(job.group.memory()),
        }

    def close(self) -> None:
        """End whatever still runs; after an error, or when the job is over."""
        self._job.group.close()
        self._journal.close()

    # The pass.

    def step(self) -> None:
        """One pass."""
        job = self._job
        now = job.clock()
        try:
            if self._journal.refused is not None:
                raise FencedError(self._journal.refused)
            self._reader.read(now)
            going = job.phase in (Phase.LAUNCHING, Phase.TRAINING)
            if self._stop_reason is not None and going:
                self._end.stop(JobState.CANCELLED, Cause.ENDED, self._stop_reason)
            self._controls.turn(now)
            match job.standing:
                case Launching():
                    self._launch(now)
                case Training():
                    self.restocking.turn(job.attempt.on_new_ground)
                    self._watch(now)
                case Stopping(ending):
                    self._watch_stop(ending, now)
        except FencedError as error:
            logger.error("another attempt has the job; ending this one: %s", error)
            job.group.close()
            job.standing = Over()

    def _launch(self, now: float) -> None:
        if self._failed(now) or self._late(now):
            return
        job = self._job
        attempt, began = job.attempt, job.clock()
        lost = self._starter.launch(now)
        attempt.held_up(job.clock() - began)
        if lost is not None:
            self._decisions.decide([lost], now)

    def _watch(self, now: float) -> None:
        job = self._job
        if self._failed(now) or self._late(now):
            return
        ended = job.group.ended()
        if len(ended) < job.world:
            return
        if why := missed(ended, job.attempt.under_way):
            self._decisions.go_back_elsewhere(why)
        elif self._end.drained(ended, now):
            self._end.complete(ended)

    def _failed(self, now: float) -> bool:
        """Whether ranks have failed: the attempt is over, or about to be."""
        job = self._job
        attempt = job.attempt
        failed = [end for end in job.group.ended() if end.how != "done"]
        if not failed:
            return False
        attempt.ended_since = attempt.ended_since or job.clock()
        cause = first_causes(failed)[0]
        patience = NODE_BLAME_S if blames_a_peer(cause) else BLAME_S
        if cause.how != "lost" and now - attempt.ended_since < patience:
            return True
        if why := overwritten(cause, attempt.under_way):
            self._decisions.go_back_elsewhere(why)
            return True
        if (point := job.starts.refuse(cause, attempt)) is not None:
            job.journal.happened(notices.copy_refused(point, cause.error), now)
        self._decisions.decide([died(failed, attempt.facts, now)], now)
        return True

    def _late(self, now: float) -> bool:
        """Whether the first or the next step is overdue; the attempt is then over."""
        job = self._job
        incident = job.attempt.overdue(now, job.saves.end_time(job.world))
        if incident is not None:
            told = explained(incident, job.group, Path(job.attempt.resume.job_dir))
            self._decisions.decide([told], now)
        return incident is not None

    def _watch_stop(self, ending: Ending, now: float) -> None:
        why = self._end.watch(ending, now, cancelled=self._stop_reason is not None)
        if why is not None:
            assert ending.control is not None
            self._go_on_instead(ending.control, why, now)

    def _go_on_instead(self, control: Control, why: str, now: float) -> None:
        """A pause that would lose what was trained: the newest copy in memory goes on."""
        job = self._job
        facts = job.attempt.facts
        told = why.strip(" ().")
        message = f"the state could not be kept, so training goes on: {told}"
        self._controls.answer(control, "refused", message, facts.step, now)
        reason = f"Training goes on from the newest state, which no checkpoint holds: {told}."
        action = drafted("restart", (), facts.history(now, ()), reason)
        self._decisions.take_in(replace(action, in_place=False, asked=control.asked))
        self._starter.next(reason)

    # What a control reaches (``orchestrator.supervision.control_room.Floor``).

    @property
    def attempt(self) -> AttemptState:
        """The present one."""
        return self._job.attempt

    def takes_commands(self) -> bool:
        """Whether the ranks train and go on."""
        return self._job.takes_commands()

    def before_ranks(self) -> bool:
        """Whether the ranks are not given out: the attempt may as well begin elsewhere."""
        return self.phase is Phase.LAUNCHING and not self._job.group.ended()

    def may_pause_now(self) -> bool:
        """Whether a job whose ranks don't train would lose nothing by a pause."""
        begins = self.phase is Phase.TRAINING and not self.attempt.trains
        return (self.phase is Phase.LAUNCHING or begins) and self._job.is_kept()

    def points_after_restart(self) -> set[int]:
        """Steps that another attempt could start from."""
        return self._job.starts.steps(self.attempt.facts.actions)

    def take_in(self, action: Action, now: float) -> None:
        """Store what a person asked for, and build on it from here on."""
        self._decisions.take_in(action)

    def post(self, order: Order) -> int:
        """Send a command to the ranks; its number."""
        return self._job.post(order)

    def go_back(self, action: Action) -> int:
        """Send the ranks to their own snapshots; the command's number."""
        return self._job.go_back(action)

    def next_attempt(self, reason: str) -> None:
        """End the ranks and start the next attempt."""
        self._starter.next(reason)

    def pause(self, reason: str, control: Control) -> None:
        """Stop the ranks after a checkpoint, and with them the job."""
        self._end.stop(*end_of(control), reason, control)
