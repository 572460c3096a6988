"""The supervisor actor: one a job, between the controller and the ranks.

Promises: crash-only. All it needs is in the ``ResumeState`` and in what keepers and disk
hold; when it dies its ranks end themselves, and the next supervisor starts the next
attempt. The work itself is ``orchestrator.supervision.supervision``; this is its Ray skin.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from launch.checkpoints import checkpoint_folder
from launch.preflight_run import PreflightRun
from launch.step_part import Sent
from launch.worker_group import WorkerGroup
from monitoring.environment import environment
from monitoring.records import StepRecord
from monitoring.utilization import RANK_PEAK
from monitoring.wandb_run import WandbRun
from orchestrator.instant import Instant
from orchestrator.node_slot import NodeSlot, working
from orchestrator.planning.utilization import rank_peak_tokens_per_s
from orchestrator.protocol import (
    BY_KEEPERS,
    CONTROLLER_ACTOR,
    NAMESPACE,
    Acknowledgement,
    ControllerPort,
    JobHistory,
    PastMark,
    ResumeState,
    SupervisorBatch,
    whole_history,
)
from orchestrator.recovery.controls import Control
from orchestrator.spec.backend import backend_of
from orchestrator.store.errors import StoreUnavailableError
from orchestrator.supervision.journal import RunLog
from orchestrator.supervision.notices import backend_detail
from orchestrator.supervision.outbox import RETRY_S, ControllerUnreachableError
from orchestrator.supervision.phases import Phase
from orchestrator.supervision.preflight_gate import PreflightGate
from orchestrator.supervision.supervision import Supervision

logger = logging.getLogger(__name__)

PASS_S = 0.25
"""Longest time between two passes; a report, or a rank's end, starts one at once."""
ANSWER_S = 30.0
"""Seconds that the controller may take to answer before it counts as unreachable."""


class RayController:
    """The controller, found by name again after each restart."""

    def __init__(self) -> None:
        self._actor: Any = None

    def next_attempt(self, job: str, attempt: int, reason: str) -> ResumeState:
        """Raises ControllerUnreachableError, or what the controller raised."""
        resume: ResumeState = self._call("next_attempt", job, attempt, reason)
        return resume

    def history(self, job: str, after: PastMark | None = None) -> JobHistory:
        """Raises ControllerUnreachableError, or what the controller raised."""
        past: JobHistory = self._call("history", job, after)
        return past

    def report(self, job: str, attempt: int, batch: SupervisorBatch) -> Acknowledgement:
        """Raises ControllerUnreachableError, or what the controller raised."""
        answer: Acknowledgement = self._call("report", job, attempt, batch)
        return answer

    def _call(self, method: str, *args: Any) -> Any:
        import ray

        try:
            if self._actor is None:
                self._actor = ray.get_actor(CONTROLLER_ACTOR, namespace=NAMESPACE)
            return ray.get(getattr(self._actor, method).remote(*args), timeout=ANSWER_S)
        except ray.exceptions.RayTaskError as error:
            cause = error.as_instanceof_cause()
            if isinstance(cause, StoreUnavailableError):
                # As good as a controller that is away: what it was told, it is told again.
                raise ControllerUnreachableError(str(error.cause)) from None
            raise cause from None
        except (ValueError, ray.exceptions.RayError) as error:
            self._actor = None
            raise ControllerUnreachableError(f"{type(error).__name__}: {error}") from error


class Supervisor:
    """Run as a detached Ray actor named ``protocol.supervisor_actor(job)``."""

    def __init__(self) -> None:
        self._supervision: Supervision | None = None
        self._stop_reason: str | None = None
        self._going: bool | None = None

    def run(self, resume: ResumeState) -> None:
        """Run the job to a terminal or paused state, which is reported before this returns."""
        import ray

        self._going = True
        try:
            me = ray.get_runtime_context().current_actor
            group = WorkerGroup(
                resume.job,
                me,
                on_gpu=resume.spec.gpus_per_node is not None,
                on_change=self._wake,
            )
            controller = RayController()
            past = history(controller, resume.job)
            self._supervision = Supervision(
                resume,
                controller,
                group,
                run_log=run_log(resume, past),
                history=past,
                gate=PreflightGate(resume.spec, partial(_begin_checks, group, self._wake)),
            )
            if self._stop_reason is not None:
                self._supervision.ask_stop(self._stop_reason)
            self._loop(self._supervision)
        finally:
            self._going = False

    def report(self, reports: Sequence[Sent]) -> None:
        """What ranks call, and what merges their reports; returns at once."""
        if self._supervision is not None:
            self._supervision.deliver(reports)

    def stop(self, reason: str) -> None:
        """End the job as cancelled, after a checkpoint where there is something to save."""
        self._stop_reason = reason
        if self._supervision is not None:
            self._supervision.ask_stop(reason)

    def control(self, controls: Sequence[Control]) -> None:
        """What people ask for; the same ones come again until they are answered."""
        if self._supervision is not None:
            self._supervision.ask(controls)

    def spares(self, spares: Sequence[NodeSlot]) -> None:
        """The nodes that stand ready for the job now."""
        if self._supervision is not None:
            self._supervision.restocking.stand_ready(spares)

    def ping(self) -> bool | None:
        """Whether ``run`` is going; None: it was never called."""
        return self._going

    def status(self) -> dict[str, object]:
        """Where the job stands; empty before ``run``."""
        return {} if self._supervision is None else self._supervision.status()

    def _wake(self) -> None:
        if self._supervision is not None:
            self._supervision.inbox.wake()

    def _loop(self, supervision: Supervision) -> None:
        try:
            while supervision.phase is not Phase.OVER:
                supervision.step()
                supervision.inbox.wait(PASS_S)
        finally:
            # Also after an error of ours: the next supervisor must find no rank of this one.
            supervision.close()


def _begin_checks(group: WorkerGroup, wake: Callable[[], None], *arguments: Any) -> PreflightRun:
    """``orchestrator.supervision.preflight_gate.Begin``, in the workers of ``group``."""
    seats, newcomers, demand, limits, now, timeout_s = arguments
    return PreflightRun(
        seats,
        group.one_a_node(),
        newcomers,
        demand,
        limits,
        now=now,
        timeout_s=timeout_s,
        on_change=wake,
        clock=Instant.now,
    )


def history(
    controller: ControllerPort, job: str, sleep: Callable[[float], None] = time.sleep
) -> JobHistory:
    """What was told of the job so far. A controller that doesn't answer is asked again until it
    does: there would be no attempt without it either."""

    def page(after: PastMark | None) -> JobHistory:
        wait = RETRY_S[0]
        while True:
            try:
                return controller.history(job, after)
            except ControllerUnreachableError as error:
                logger.warning("the past of %s isn't told yet (%s); asking again", job, error)
                sleep(wait)
                wait = min(2 * wait, RETRY_S[1])

    try:
        return whole_history(page)
    except Exception as error:
        # Its row would be as damaged the next time, and nothing that is decided depends on it.
        logger.exception("the past of %s can't be read", job)
        return JobHistory(unread=f"{type(error).__name__}: {error}")


def _topology(resume: ResumeState) -> dict[str, int]:
    """What the job runs on, for W&B's configuration; its degrees are in the spec."""
    seats = working(resume.nodes)
    return {
        "nodes": len(seats),
        "ranks": sum(node.slots for node in seats),
        "spares": len(resume.nodes) - len(seats),
    }


def written_since(past: JobHistory) -> list[int]:
    """Checkpoints that were made after the last supervisor ended, which its run can't know."""
    found: list[int] = []
    for event in past.events:
        if event["kind"] == "attempt_started":
            found = []
        elif event["kind"] == "checkpoint_written" and event["detail"].get("by") == BY_KEEPERS:
            found.append(int(event["detail"]["step"]))
    return found


def run_log(resume: ResumeState, past: JobHistory) -> RunLog | None:
    """The job's W&B run; None when there can't be one, for training goes on without."""
    try:
        spec = resume.spec.model_dump(mode="json") | backend_detail(backend_of(resume.spec))
        spec |= {"environment": environment(), "topology": _topology(resume)}
        if (peak := rank_peak_tokens_per_s(resume.spec)) is not None:
            spec[RANK_PEAK] = peak
        run = WandbRun(resume.spec.wandb, resume.job, Path(resume.job_dir), spec)
        run.start(
            steps=[StepRecord.from_json(row) for row in past.steps],
            incidents=past.incidents,
            actions=[action.to_json() for action in resume.actions],
        )
        for step in written_since(past):
            run.log_checkpoint(step, checkpoint_folder(resume.job_dir, step))
    except Exception:
        logger.exception("no W&B run for %s", resume.job)
        return None
    return run
