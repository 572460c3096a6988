"""What becomes of trouble, of quiet and of what a person asked for: decided, stored, carried out.

Promises: what incidents of one record lead to is one decision; an action is durable before its
command is posted or the next attempt begins.
"""

from __future__ import annotations

from collections.abc import Sequence

from launch.commands import SetExchange, SetPrecision
from monitoring.records import Incident
from orchestrator.actions import Action
from orchestrator.lifecycle import Cause, JobState
from orchestrator.recovery.evidence import LOST_RANK
from orchestrator.recovery.policy import decide, exchange_to_fp8, return_to_fp8
from orchestrator.recovery.way_back import joined
from orchestrator.supervision import notices
from orchestrator.supervision.attempt_starter import AttemptStarter
from orchestrator.supervision.job_end import JobEnd
from orchestrator.supervision.job_in_hand import JobInHand
from orchestrator.supervision.phases import Phase

IN_STRIDE = frozenset({"none", "skip_step", "accept", "exchange_bf16", "early_fallback"})
"""Answers with which training goes on without a way back."""


class Decisions:
    """Of one job."""

    def __init__(self, job: JobInHand, starter: AttemptStarter, end: JobEnd) -> None:
        self._job = job
        self._starter = starter
        self._end = end

    def decide(self, incidents: Sequence[Incident], now: float, *, in_memory: bool = True) -> None:
        """``in_memory``: whether the ranks can go back to what they hold in theirs."""
        job = self._job
        attempt = job.attempt
        history = attempt.facts.history(now, attempt.book.restorable() if in_memory else ())
        action = decide(incidents, history, job.spec.recovery)
        transition = None
        if action.kind not in IN_STRIDE:
            lost = any(incident.kind in LOST_RANK for incident in incidents)
            transition = (JobState.RECOVERING, Cause.RANK_LOST if lost else Cause.INCIDENT)
        if action.kind == "accept":
            job.bank.renew(attempt.facts.step + 1)
        job.decided(action, incidents, transition)
        way = joined(job.way_back, action, attempt.facts.step)
        attempt.facts.apply(action)
        match action.kind:
            case "skip_step" | "accept" | "none":
                return
            case "exchange_bf16":
                assert action.exchange is not None
                job.post(SetExchange(action.exchange))
            case "early_fallback":
                job.post(SetPrecision(dict(action.precision)))
            case "fail":
                self._end.finish(JobState.FAILED, Cause.ERROR, action.reason)
            case "pause" if action.to_step is not None and not action.in_place:
                # A checkpoint of a state that is gone back from would push out good ones.
                self._end.finish(JobState.PAUSED, Cause.BUDGET_SPENT, action.reason)
            case "pause":
                if action.to_step is not None:
                    job.go_back(action)
                self._end.stop(JobState.PAUSED, Cause.BUDGET_SPENT, action.reason)
            case _ if action.in_place:
                job.way_back = way
                job.go_back(action)
            case _:
                job.way_back = way
                self._starter.next(action.reason)

    def calm(self, now: float) -> None:
        """Layers, and the gradient exchange, that were quiet long enough go back to FP8."""
        job = self._job
        attempt = job.attempt
        facts = attempt.facts
        if job.phase is not Phase.TRAINING:
            return
        for fallen, returning in (
            (bool(facts.precision), return_to_fp8),
            (facts.exchange == "bf16", exchange_to_fp8),
        ):
            if not fallen:
                continue
            history = facts.history(now, attempt.book.restorable())
            action = returning(history, job.spec.recovery)
            if action.kind == "none":
                continue
            job.decided(action)
            facts.apply(action)
            back = action.exchange
            job.post(SetExchange(back) if back else SetPrecision(dict(action.precision)))

    def go_back_elsewhere(self, why: str) -> None:
        """A way back that is stored, and that the ranks can't take, is the next attempt's."""
        job = self._job
        assert job.attempt.under_way is not None
        told = notices.way_back_missed(why, job.attempt.under_way[1].to_step)
        job.journal.happened(told, job.clock())
        job.way_back = None if job.way_back is None else job.way_back.elsewhere()
        self._starter.next(told.message)

    def take_in(self, action: Action) -> None:
        """Store what a person asked for, and build on it from here on."""
        job = self._job
        back = action.to_step is not None or action.kind == "restart"
        transition = (JobState.RECOVERING, Cause.CONTROL_ASKED) if back else None
        job.decided(action, (), transition)
        facts = job.attempt.facts
        if back:
            job.way_back = joined(job.way_back, action, facts.step)
        facts.apply(action)
