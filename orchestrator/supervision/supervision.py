"""The supervisor's loop over one job, without Ray: reports in, decisions out, one pass a call.

A pass (``step``) reads what the ranks reported, then turns to what people asked, then looks at
what ended, then at what is late. Incidents that one record shows are one decision, what a
person asks is one; the action is durable before its command is posted. Promises: time is an
argument; a pass never waits for a rank; when the controller refuses us, the ranks are ended
and nothing is written any more.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from enum import Enum
from pathlib import Path

from launch.commands import (
    BackendReport,
    CopyFailed,
    CopyRefused,
    DrillReport,
    ExchangeReport,
    Order,
    RankReport,
    RestoredOlder,
    RollbackReport,
    SetExchange,
    SetPrecision,
    SnapshotReport,
    Stop,
)
from launch.rank_group import NodeSilentError, RankEnd, RankGroup
from launch.step_part import Sent, StepPart
from monitoring.environment import environment
from monitoring.records import Incident, StepRecord
from orchestrator.actions import Action
from orchestrator.events import Notice
from orchestrator.lifecycle import Cause, JobState
from orchestrator.protocol import ControllerPort, FencedError, JobHistory, ResumeState
from orchestrator.recovery.controls import Control
from orchestrator.recovery.detector_bank import bank_of, new_bank
from orchestrator.recovery.evidence import LOST_RANK
from orchestrator.recovery.last_steps import missed, out_of_reach, overwritten
from orchestrator.recovery.policy import decide, exchange_chosen, exchange_to_fp8, return_to_fp8
from orchestrator.recovery.rungs import drafted
from orchestrator.recovery.way_back import joined, left_open
from orchestrator.saved.checkpoint_facts import facts_of
from orchestrator.saved.checkpoint_shelf import CheckpointShelf
from orchestrator.spec.backend import backend_of
from orchestrator.spec.degrees import other_degrees
from orchestrator.supervision import notices
from orchestrator.supervision.attempt import assignments, ranks_told, seats, world_size
from orchestrator.supervision.attempt_state import AttemptState
from orchestrator.supervision.control_room import ControlRoom
from orchestrator.supervision.ending import Ending, end_of, unsaved, why_no_checkpoint
from orchestrator.supervision.hang_report import explained
from orchestrator.supervision.inbox import Inbox
from orchestrator.supervision.journal import Journal, RunLog
from orchestrator.supervision.lost_ranks import blames_a_peer, died, first_causes
from orchestrator.supervision.outbox import ControllerUnreachableError, Outbox
from orchestrator.supervision.preflight_gate import Look, PreflightGate
from orchestrator.supervision.record_merger import record_of
from orchestrator.supervision.restocking import Restocking
from orchestrator.supervision.starting_points import StartingPoints
from orchestrator.supervision.stragglers import Slow, incident_of, slow_nodes

logger = logging.getLogger(__name__)

BLAME_S = 0.5
"""Seconds that errors of ranks wait for the news of a dead peer that would explain them."""
NODE_BLAME_S = 2.5
"""The same for errors that say that a peer is gone. The news that a node died takes Ray a second
(``orchestrator.cluster.on_ray``), and before it nobody could give the ranks to another one."""
DRAIN_S = 10.0
"""Seconds that the last reports may take after the ranks have ended."""
STOP_S = 45.0
"""Seconds that a stop may take, its checkpoint included; the controller ends us after 60."""


IN_STRIDE = frozenset({"none", "skip_step", "accept", "exchange_bf16", "early_fallback"})
"""Answers with which training goes on without a way back."""


class Phase(Enum):
    """Where an attempt stands."""

    LAUNCHING = "launching"
    """Workers do their imports."""
    TRAINING = "training"
    """Ranks are given out."""
    STOPPING = "stopping"
    """Ranks were told to stop."""
    OVER = "over"


class Supervision:
    """One job from one ``ResumeState`` to its end, over as many attempts as that takes."""

    def __init__(
        self,
        resume: ResumeState,
        controller: ControllerPort,
        group: RankGroup,
        *,
        now: float,
        run_log: RunLog | None = None,
        history: JobHistory | None = None,
        sleep: Callable[[float], None] = time.sleep,
        gate: PreflightGate | None = None,
    ) -> None:
        """Starts the workers of the first attempt; ``gate``: None lets every node pass."""
        self.inbox = Inbox()
        self._controller = controller
        self._group = group
        self._sleep = sleep
        self._gate = gate
        self._spec = resume.spec
        self._world = world_size(resume)
        outbox = Outbox(controller, resume.job, resume.attempt)
        self._journal = Journal(resume, outbox, run_log, history)
        num_to_keep = resume.spec.checkpoint.num_to_keep
        facts = facts_of(resume.spec)
        self._shelf = CheckpointShelf(resume.job_dir, num_to_keep, self._world, facts)
        self._bank = bank_of(resume)
        self._starts = StartingPoints(group, self._shelf, resume.spec, self._world)
        self._way_back = left_open(resume)
        self._controls = ControlRoom(resume.spec, resume.actions, self._journal, self)
        self._slow_nodes: set[str] = set()
        self._stop_reason: str | None = None
        self._ending: Ending | None = None
        self._attempt = AttemptState(resume, self._world, now)
        self.phase = Phase.LAUNCHING
        self.restocking = Restocking(group, resume.spec.resources.standby)
        self.restocking.begin(resume)
        group.start(seats(resume))

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
        facts = self._attempt.facts
        return {
            "phase": self.phase.value,
            "attempt": facts.attempt,
            "timeline": facts.timeline,
            "step": facts.step,
            "restorable": [(r.step, r.certified) for r in self._attempt.book.restorable()],
            "high_precision_layers": sorted(facts.precision),
            "exchange": facts.exchange,
            "held_step": self._attempt.copies.complete,
            "keeper_bytes": dict(self._group.memory()),
        }

    def close(self) -> None:
        """End whatever still runs; after an error, or when the job is over."""
        self._group.close()
        self._journal.close()

    # The pass.

    def step(self, now: float) -> None:
        """One pass at the time ``now``, seconds since the epoch."""
        try:
            if self._journal.refused is not None:
                raise FencedError(self._journal.refused)
            self._read(now)
            ending = self._ending is not None or self.phase is Phase.OVER
            if self._stop_reason is not None and not ending:
                self._stop(now, JobState.CANCELLED, Cause.ENDED, self._stop_reason)
            self._controls.turn(now)
            if self.phase is Phase.LAUNCHING:
                self._launch(now)
            elif self.phase is Phase.TRAINING:
                self.restocking.turn(self._attempt.on_new_ground)
                self._watch(now)
            elif self.phase is Phase.STOPPING:
                self._watch_stop(now)
        except FencedError as error:
            logger.error("another attempt has the job; ending this one: %s", error)
            self._group.close()
            self.phase = Phase.OVER

    def _read(self, now: float) -> None:
        """Reports, in the order in which they came; others' attempts are refused."""
        for report in self.inbox.drain():
            attempt = self._attempt
            if self.phase is Phase.OVER or report.attempt != attempt.facts.attempt:
                continue
            match report:
                case RankReport() | StepPart():
                    self._controls.applied(report, now)
                    whole = attempt.merger.add(report)
                    if whole is None:
                        continue
                    self._record(record_of(whole), now)
                    slow = attempt.stragglers.add(whole)
                    if slow and attempt is self._attempt:
                        self._slow(slow, whole, now)
                case SnapshotReport(tier="ring"):
                    attempt.book.add(report, attempt.facts.timeline)
                case SnapshotReport(tier="disk"):
                    if report.timeline == attempt.facts.timeline and self._shelf.add(report):
                        failed = self._shelf.commit(report)
                        self._journal.happened(notices.checkpoint(report.step, failed), now)
                case SnapshotReport():
                    if attempt.copies.add(report):
                        self._group.settle(attempt.replicas)
                        self._journal.happened(notices.replicated(report.step, attempt), now)
                case RollbackReport():
                    logger.debug("rank %d is back at step %d", report.rank, report.step)
                case DrillReport():
                    if report.drill not in attempt.facts.fired_drills:
                        kind = self._spec.drills[report.drill].kind
                        self._journal.happened(notices.drill(report, kind), now)
                    attempt.facts.fired_drills.add(report.drill)
                case CopyFailed():
                    self._shelf.lose(report)
                    self._journal.happened(notices.copy_failed(report), now)
                case CopyRefused():
                    self._starts.passed_over(report)
                    self._journal.happened(notices.copy_passed_over(report), now)
                case RestoredOlder():
                    self._restored_older(report, now)
                case BackendReport(choice=choice):
                    self._journal.chosen(choice, now)
                case ExchangeReport():
                    self._exchange_chosen(report, now)

    def _slow(self, slow: Sequence[Slow], step: StepPart, now: float) -> None:
        """Ranks hold up the others: told, and their node replaced where the spec says so, once."""
        nodes = self._attempt.resume.nodes
        incident, where = incident_of(slow, nodes, step, now), slow_nodes(slow, nodes)
        self._journal.happened(notices.slow_ranks(incident, where), now)
        new = set(where) - self._slow_nodes
        if new and self._spec.recovery.replace_slow_nodes and self.takes_commands():
            # Where there is no other node it comes back: that one is not tried again.
            self._slow_nodes |= new
            self._decide([incident], now)

    def _exchange_chosen(self, report: ExchangeReport, now: float) -> None:
        """A measurement is the job's where there is none, or a person asked for one.

        It is durable before any step that was made with it.
        """
        facts = self._attempt.facts
        if facts.exchange is not None and not self._controls.measures:
            return
        history = facts.history(now, self._attempt.book.restorable())
        action = exchange_chosen(history, report.dtype, report.reason)
        self._journal.decided(action, (), None, self._bank.state_dict())
        self._journal.configured({"exchange": report.dtype, "exchange_reason": report.reason})
        facts.apply(action)
        self._controls.measured(report, action.reason, now)

    def _record(self, record: StepRecord, now: float) -> None:
        attempt = self._attempt
        first = not attempt.trains
        attempt.record(record, now)
        incidents = self._bank.observe(record)
        due = record.step % self._spec.snapshots.every == 0
        steps = self._spec.training.steps
        ended = bool(incidents) and out_of_reach(record.step, steps, self._group.ended())
        trains = self.phase is Phase.TRAINING
        context = attempt.context(record, decides=trains, ended=ended)
        self._journal.recorded(record, self._bank.state_dict() if due else None, context)
        self._followed(record, first, now)
        if incidents:
            attempt.book.unhealthy(record.step)
            if self.phase is Phase.TRAINING:
                self._decide(incidents, now, in_memory=not ended)
        else:
            attempt.book.healthy(record.step)
            self._calm(now)

    def _followed(self, record: StepRecord, first: bool, now: float) -> None:
        """Says so when a step is the first one after a start or a way back."""
        way, self._way_back = self._way_back, None
        told = [notices.training(record.attempt, record.step)] if first else []
        if way is not None:
            told.append(notices.recovered(way, record.time, record.step))
        cause = Cause.FIRST_STEP if first else Cause.RECOVERED
        for notice in told:
            last = notice is told[-1]
            self._journal.happened(notice, now, (JobState.RUNNING, cause) if last else None)
        if first:
            self._controls.trains(record.step, now)

    # Decisions.

    def _decide(self, incidents: Sequence[Incident], now: float, *, in_memory: bool = True) -> None:
        """``in_memory``: whether the ranks can go back to what they hold in theirs."""
        attempt = self._attempt
        history = attempt.facts.history(now, attempt.book.restorable() if in_memory else ())
        action = decide(incidents, history, self._spec.recovery)
        transition = None
        if action.kind not in IN_STRIDE:
            lost = any(incident.kind in LOST_RANK for incident in incidents)
            transition = (JobState.RECOVERING, Cause.RANK_LOST if lost else Cause.INCIDENT)
        if action.kind == "accept":
            self._bank.renew(attempt.facts.step + 1)
        self._journal.decided(action, incidents, transition, self._bank.state_dict())
        way = joined(self._way_back, action, attempt.facts.step)
        attempt.facts.apply(action)
        match action.kind:
            case "skip_step" | "accept" | "none":
                return
            case "exchange_bf16":
                assert action.exchange is not None
                self.post(SetExchange(action.exchange))
            case "early_fallback":
                self.post(SetPrecision(dict(action.precision)))
            case "fail":
                self._finish(now, JobState.FAILED, Cause.ERROR, action.reason)
            case "pause" if action.to_step is not None and not action.in_place:
                # A checkpoint of a state that is gone back from would push out good ones.
                self._finish(now, JobState.PAUSED, Cause.BUDGET_SPENT, action.reason)
            case "pause":
                if action.to_step is not None:
                    self.go_back(action, now)
                self._stop(now, JobState.PAUSED, Cause.BUDGET_SPENT, action.reason)
            case _ if action.in_place:
                self._way_back = way
                self.go_back(action, now)
            case _:
                self._way_back = way
                self.next_attempt(action.reason, now)

    def _calm(self, now: float) -> None:
        """Layers, and the gradient exchange, that were quiet long enough go back to FP8."""
        attempt = self._attempt
        facts = attempt.facts
        if self.phase is not Phase.TRAINING:
            return
        for fallen, returning in (
            (bool(facts.precision), return_to_fp8),
            (facts.exchange == "bf16", exchange_to_fp8),
        ):
            if not fallen:
                continue
            history = facts.history(now, attempt.book.restorable())
            action = returning(history, self._spec.recovery)
            if action.kind == "none":
                continue
            self._journal.decided(action, (), None, self._bank.state_dict())
            facts.apply(action)
            back = action.exchange
            self.post(SetExchange(back) if back else SetPrecision(dict(action.precision)))

    def go_back(self, action: Action, now: float) -> int:
        """Every rank to its own snapshot of ``action.to_step``, as a new timeline; returns the
        command's number."""
        order = self._attempt.go_back(action, now)
        self._shelf.forget()
        self._bank.rewind(order.to_step, timeline=order.timeline)
        number = self.post(order)
        self._attempt.under_way = (number, action)
        return number

    def _go_back_elsewhere(self, why: str, now: float) -> None:
        """A way back that is stored, and that the ranks can't take, is the next attempt's."""
        assert self._attempt.under_way is not None
        told = notices.way_back_missed(why, self._attempt.under_way[1].to_step)
        self._journal.happened(told, now)
        self._way_back = None if self._way_back is None else self._way_back.elsewhere()
        self.next_attempt(told.message, now)

    # What a control reaches (``orchestrator.supervision.control_room.Floor``).

    @property
    def attempt(self) -> AttemptState:
        """The present one."""
        return self._attempt

    def takes_commands(self) -> bool:
        """Whether the ranks train and go on."""
        trains = self.phase is Phase.TRAINING and self._attempt.trains
        done = self._attempt.facts.step + 1 >= self._spec.training.steps
        return trains and not done and self._ending is None and not self._group.ended()

    def before_ranks(self) -> bool:
        """Whether the ranks are not given out: the attempt may as well begin elsewhere."""
        return self.phase is Phase.LAUNCHING and self._ending is None and not self._group.ended()

    def may_pause_now(self) -> bool:
        """Whether a job whose ranks don't train would lose nothing by a pause."""
        waits = self.phase is Phase.LAUNCHING or not self._attempt.trains
        going = self._ending is None and self.phase is not Phase.OVER
        return waits and going and self._all_on_disk()

    def points_after_restart(self) -> set[int]:
        """Steps that another attempt could start from."""
        return self._starts.steps(self._attempt.facts.actions)

    def take_in(self, action: Action, now: float) -> None:
        """Store what a person asked for, and build on it from here on."""
        back = action.to_step is not None or action.kind == "restart"
        transition = (JobState.RECOVERING, Cause.CONTROL_ASKED) if back else None
        self._journal.decided(action, (), transition, self._bank.state_dict())
        facts = self._attempt.facts
        if back:
            self._way_back = joined(self._way_back, action, facts.step)
        facts.apply(action)

    def post(self, order: Order) -> int:
        """Send a command to the ranks; its number."""
        command = self._attempt.command(order)
        self._group.post(command)
        return command.number

    def pause(self, reason: str, control: Control, now: float) -> None:
        """Stop the ranks after a checkpoint, and with them the job."""
        self._stop(now, *end_of(control), reason, control)

    def _all_on_disk(self) -> bool:
        """Whether what was trained, if anything, can be taken up from a checkpoint."""
        facts = self._attempt.facts
        return max(self._starts.steps_on_disk(facts.actions), default=0) >= facts.step + 1

    # Attempts.

    def next_attempt(self, reason: str, now: float) -> None:
        """End the ranks and start the next attempt."""
        self._controls.over()
        self._group.kill()
        self._journal.flush()
        while True:
            try:
                over = self._attempt.resume
                resume = self._controller.next_attempt(over.job, over.attempt, reason)
                break
            except ControllerUnreachableError as error:
                logger.warning("no next attempt yet: %s", error)
                self._sleep(0.5)
        self._journal.begin(resume.attempt)
        self._shelf.forget()
        self._resize(resume, now)
        before = self._attempt.facts
        self._attempt = AttemptState(resume, self._world, now)
        self._attempt.facts.fired_drills |= before.fired_drills
        self._attempt.facts.fp8_layers = before.fp8_layers
        self._attempt.facts.fixed_layers = before.fixed_layers
        self.phase = Phase.LAUNCHING
        self.restocking.begin(resume)
        self._group.start(seats(resume))

    def _resize(self, resume: ResumeState, now: float) -> None:
        """With resources.min_nodes the next attempt may have more or fewer ranks."""
        world = world_size(resume)
        if world == self._world:
            return
        self._spec, self._world = resume.spec, world
        self._shelf.resize(world, facts_of(resume.spec))
        self._starts.resize(world, resume.attempt)
        draft = other_degrees(resume.spec, now)
        self._journal.happened(Notice(draft.kind, draft.message, dict(draft.detail)), now)

    def _launch(self, now: float) -> None:
        """Give the ranks out once all workers are there."""
        if self._failed(now) or self._late(now) or not self._group.ready():
            return
        if not self._nodes_pass(now):
            return
        attempt = self._attempt
        try:
            master = self._group.master()
        except NodeSilentError as error:
            self._decide([died([RankEnd(0, "lost", error=str(error))], attempt.facts, now)], now)
            return
        points = self._starts.choose(attempt)
        for folder, why in self._starts.left_out():
            self._journal.happened(notices.checkpoint_left_out(folder.name, why), now)
        if lost := self._starts.lost(points, self._journal.newest_checkpoint()):
            told = notices.nothing_to_start_from(lost)
            self._finish(now, JobState.PAUSED, Cause.STATE_GONE, told)
            return
        if (taken_over := self._starts.take_over(attempt, now)) is not None:
            self._journal.decided(taken_over, (), None, self._bank.state_dict())
            attempt.facts.apply(taken_over)
        self._starts_at(points[0].step if points else 0, now)
        self._group.run(assignments(attempt.resume, attempt.facts, points, master))
        self.phase = Phase.TRAINING
        started = notices.attempt_started(
            attempt.facts.attempt,
            self._world,
            attempt.restore,
            backend_of(self._spec),
            environment(),
        )
        self._journal.happened(started, now)

    def _nodes_pass(self, now: float) -> bool:
        """Whether preflight lets the ranks start; where it doesn't, other nodes are asked for."""
        look = Look(True) if self._gate is None else self._gate.look(self._attempt.resume, now)
        if look.notice is not None:
            self._journal.happened(look.notice, now)
            if not look.passed:
                self.next_attempt(look.notice.message, now)
        return look.passed

    def _starts_at(self, start: int, now: float) -> None:
        """Bring the detectors to the step that the attempt starts at."""
        recorded = self._attempt.facts.step
        if start > recorded + 1:
            # A trend drawn across steps that nobody saw would make a healthy loss a spike.
            self._bank = new_bank(self._spec)
            self._journal.happened(notices.unrecorded(recorded + 1, start - 1), now)
        self._bank.rewind(start)

    def _restored_older(self, report: RestoredOlder, now: float) -> None:
        """The ranks had no common copy of what they were to start from."""
        wanted, self._attempt.restore = self._attempt.restore, report.point
        self._starts_at(report.step, now)
        told = notices.restored_older(report, wanted.step if wanted else 0)
        self._journal.happened(told, now)

    def _watch(self, now: float) -> None:
        if self._failed(now) or self._late(now):
            return
        ended = self._group.ended()
        if len(ended) < self._world:
            return
        if why := missed(ended, self._attempt.under_way):
            self._go_back_elsewhere(why, now)
        elif self._drained(ended, now):
            self._complete(ended, now)

    def _complete(self, ended: Sequence[RankEnd], now: float) -> None:
        """All steps are done."""
        steps = self._spec.training.steps
        done = f"All {steps} steps are done." if steps > 1 else "Its one step is done."
        newest = self._attempt.facts.step
        if newest + 1 < self._spec.training.steps:
            gap = notices.unrecorded(newest + 1, self._spec.training.steps - 1)
            self._journal.happened(gap, now)
            done = f"{done} {gap.message}"
        steps = self._spec.training.steps
        on_disk = self._starts.steps_on_disk(self._attempt.facts.actions)
        if lost := unsaved(ended, self._shelf, steps, self._attempt.resume.job, on_disk):
            # The weights are what the job was for.
            self._finish(now, JobState.FAILED, Cause.ERROR, f"{done} {lost}")
        else:
            self._finish(now, JobState.SUCCEEDED, Cause.STEPS_DONE, done)

    def _failed(self, now: float) -> bool:
        """Whether ranks have failed: the attempt is over, or about to be."""
        attempt = self._attempt
        failed = [end for end in self._group.ended() if end.how != "done"]
        if not failed:
            return False
        attempt.ended_since = attempt.ended_since or now
        cause = first_causes(failed)[0]
        patience = NODE_BLAME_S if blames_a_peer(cause) else BLAME_S
        if cause.how != "lost" and now - attempt.ended_since < patience:
            return True
        if why := overwritten(cause, attempt.under_way):
            self._go_back_elsewhere(why, now)
            return True
        if (point := self._starts.refuse(cause, attempt)) is not None:
            self._journal.happened(notices.copy_refused(point, cause.error), now)
        self._decide([died(failed, attempt.facts, now)], now)
        return True

    def _late(self, now: float) -> bool:
        """Whether the first or the next step is overdue; the attempt is then over."""
        incident = self._attempt.overdue(now)
        if incident is not None:
            told = explained(incident, self._group, Path(self._attempt.resume.job_dir))
            self._decide([told], now)
        return incident is not None

    # Ends.

    def _stop(
        self,
        now: float,
        state: JobState,
        cause: Cause,
        reason: str,
        control: Control | None = None,
    ) -> None:
        """Stop the ranks after a checkpoint; at once where there is nothing to save."""
        nothing_new = self.phase is Phase.LAUNCHING or not self._attempt.trains
        if nothing_new or any(end.how != "done" for end in self._group.ended()):
            self._finish(now, state, cause, reason)
            return
        self._ending = Ending(state, cause, reason, now + STOP_S, control)
        self._attempt.ended_since = None
        self.post(Stop(reason, checkpoint=True))
        self.phase = Phase.STOPPING

    def _watch_stop(self, now: float) -> None:
        ending = self._ending
        assert ending is not None
        ended = self._group.ended()
        failed = [end for end in ended if end.how != "done"]
        if failed:
            told = ranks_told([end.rank for end in first_causes(failed)])
            note = f" (no checkpoint: {told} ended before it was written)"
        elif len(ended) == self._world and self._drained(ended, now):
            late = missed(ended, self._attempt.under_way)
            note = f" ({late}: an older checkpoint is what a resume starts from)" if late else ""
        elif now > ending.deadline:
            note = " (ended without a checkpoint: the ranks did not stop in time)"
        else:
            return
        if ending.control is not None:
            if not note and self._attempt.facts.step + 1 == self._spec.training.steps:
                self._complete(ended, now)
                return
            if self._stop_reason is None and not self._all_on_disk():
                self._go_on_instead(
                    ending.control, note or why_no_checkpoint(ended, self._shelf), now
                )
                return
        self._finish(now, ending.state, ending.cause, f"{ending.message.rstrip('.')}{note}.")

    def _go_on_instead(self, control: Control, why: str, now: float) -> None:
        """A pause that would lose what was trained: the newest copy in memory goes on."""
        facts = self._attempt.facts
        told = why.strip(" ().")
        message = f"the state could not be kept, so training goes on: {told}"
        self._controls.answer(control, "refused", message, facts.step, now)
        reason = f"Training goes on from the newest state, which no checkpoint holds: {told}."
        action = drafted("restart", (), facts.history(now, ()), reason)
        self.take_in(replace(action, in_place=False, asked=control.asked), now)
        self._ending = None
        self.next_attempt(reason, now)

    def _drained(self, ended: Sequence[RankEnd], now: float) -> bool:
        """Whether all that the ended ranks had to report is here, or won't come any more."""
        attempt = self._attempt
        attempt.ended_since = attempt.ended_since or now
        steps = max((end.result.step for end in ended if end.result), default=0)
        # A rank's last reports come before its end, and may have come since the pass began.
        complete = attempt.facts.step + 1 >= steps and not self._shelf.waiting()
        complete = complete and self.inbox.empty
        return complete or now - attempt.ended_since > DRAIN_S

    def _finish(self, now: float, state: JobState, cause: Cause, message: str) -> None:
        """The job's end. The report comes first, so that whoever sees the state finds it."""
        self._group.close()
        self._journal.write_report(state)
        self._journal.happened(Notice("ended", message), now, (state, cause))
        self._journal.flush()
        self.phase = Phase.OVER
