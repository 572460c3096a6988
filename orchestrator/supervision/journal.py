"""Everything a supervisor has to tell, told once: to the store, to W&B, and to the report.

Promises: what is told keeps its order; an action is durable before ``decided`` returns;
memory is bounded (old records keep their numbers and lose their per-tensor statistics);
W&B and the report never stop training; no secret of the environment is in a text that is told.
"""

from __future__ import annotations

import logging
import math
import os
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from itertools import islice
from pathlib import Path
from statistics import median
from typing import Any, Protocol

from launch.checkpoints import checkpoint_folder
from monitoring.job_view import JobView
from monitoring.records import Incident, StepRecord
from monitoring.secrets import secrets_of, without, without_in
from monitoring.utilization import RANK_PEAK
from orchestrator.actions import Action
from orchestrator.events import EventDraft, Notice
from orchestrator.lifecycle import Cause, JobState
from orchestrator.planning.utilization import rank_peak_tokens_per_s
from orchestrator.protocol import JobHistory, ResumeState, StepContext
from orchestrator.recovery.controls import ControlAnswer
from orchestrator.saved.closing import LIGHT_RECORDS, WHOLE_RECORDS, write_closing
from orchestrator.saved.restore import WRITTEN, WRITTEN_OR_BACK, newest_written
from orchestrator.spec.backend import backend_of
from orchestrator.supervision.notices import backend_chosen, backend_detail, decided, seen
from orchestrator.supervision.outbox import Outbox, Told
from parallel.precision.choice import BackendChoice

STEPS_TIMED = 100
"""Newest steps that tell how long one takes."""

logger = logging.getLogger(__name__)


class RunLog(Protocol):
    """The W&B run (``monitoring.wandb_run.WandbRun``): never blocks, never raises."""

    def log_step(self, record: StepRecord) -> None: ...

    def log_incident(self, incident: Mapping[str, Any]) -> None: ...

    def log_action(self, action: Mapping[str, Any]) -> None: ...

    def log_config(self, values: Mapping[str, Any]) -> None: ...

    def log_start(self, start: Mapping[str, Any]) -> None: ...

    def log_checkpoint(self, step: int, folder: Path) -> None: ...

    def finish(self, summary: Mapping[str, Any] | None = None, timeout: float = 20.0) -> bool: ...


class Journal:
    """The supervisor's side of the job's history."""

    def __init__(
        self,
        resume: ResumeState,
        outbox: Outbox,
        run_log: RunLog | None = None,
        history: JobHistory | None = None,
    ) -> None:
        """``history``: what earlier supervisors of the job told, for the report."""
        past = history or JobHistory()
        self._secrets = secrets_of(os.environ)
        self._resume = resume
        self._attempt = resume.attempt
        self._outbox = outbox
        self._run_log = run_log
        self._light: deque[StepRecord] = deque(
            map(StepRecord.from_json, past.steps), maxlen=LIGHT_RECORDS
        )
        self._whole: deque[StepRecord] = deque()
        self._incidents: list[Mapping[str, Any]] = list(past.incidents)
        self._actions: list[Mapping[str, Any]] = [action.to_json() for action in resume.actions]
        self._events: list[Mapping[str, Any]] = list(past.events)
        self._written: list[Mapping[str, Any]] = list(resume.written)

    @property
    def refused(self) -> str | None:
        """Why the controller no longer listens to this attempt; None while it does."""
        return self._outbox.refused

    def recorded(
        self,
        record: StepRecord,
        detector_state: Mapping[str, Any] | None = None,
        context: StepContext | None = None,
    ) -> None:
        """A step is complete."""
        kept = None if context is None or context.usual else context
        told = Told(step=record.to_json(), context=kept, detector_state=detector_state)
        self._outbox.tell(told)
        self._whole.append(record)
        if len(self._whole) > WHOLE_RECORDS:
            self._light.append(replace(self._whole.popleft(), tensors={}))
        if self._run_log:
            self._run_log.log_step(record)

    def decided(
        self,
        action: Action,
        incidents: Sequence[Incident],
        transition: tuple[JobState, Cause] | None,
        detector_state: Mapping[str, Any] | None = None,
    ) -> None:
        """An action and what it answers; durable on return. Raises FencedError."""
        # What a rank or a node raised may quote anything.
        action = Action.from_json(without_in(action.to_json(), self._secrets))
        rows = [without_in(incident.to_json(), self._secrets) for incident in incidents]
        events = [self._noted(seen(incident), incident.time) for incident in incidents]
        events.append(self._noted(decided(action), action.time))
        told = [Told(incident=row) for row in rows]
        told += [Told(event=event) for event in events]
        told.append(Told(action=action, transition=transition, detector_state=detector_state))
        self._outbox.store(*told)
        self._incidents += rows
        self._actions.append(action.to_json())
        if self._run_log:
            for row in rows:
                self._run_log.log_incident(row)
            self._run_log.log_action(action.to_json())

    def happened(
        self, notice: Notice, now: float, transition: tuple[JobState, Cause] | None = None
    ) -> None:
        """An event; with a transition it goes out at once."""
        event = self._noted(notice, now)
        self._outbox.tell(Told(event=event, transition=transition), urgent=transition is not None)
        if self._run_log and notice.kind == "attempt_started":
            self._run_log.log_start(notice.detail)
        if self._run_log and notice.kind == WRITTEN:
            step = int(notice.detail["step"])
            self._run_log.log_checkpoint(step, checkpoint_folder(self._resume.job_dir, step))

    def answered(self, answer: ControlAnswer, notice: Notice, now: float) -> None:
        """What became of a control; goes out at once."""
        self._outbox.tell(Told(event=self._noted(notice, now), answer=answer), urgent=True)

    def chosen(self, choice: BackendChoice, now: float) -> None:
        """What the ranks run their linears on; an event where it wasn't foretold."""
        if choice != backend_of(self._resume.spec):
            self.happened(backend_chosen(choice), now)
        if self._run_log:
            self._run_log.log_config(backend_detail(choice))

    def configured(self, values: Mapping[str, Any]) -> None:
        """More of the run's configuration for W&B, known only now."""
        if self._run_log:
            self._run_log.log_config(values)

    def newest_checkpoint(self) -> int:
        """Step of the newest checkpoint that was told as written and still counts; 0 for none."""
        return newest_written(self._written)

    def step_time_s(self) -> float:
        """Seconds that a step takes, as the newest ones did; without end where none is known."""
        newest = islice(reversed(self._whole or self._light), STEPS_TIMED)
        return median(times) if (times := [step.step_time_s for step in newest]) else math.inf

    def flush(self, timeout_s: float | None = None) -> bool:
        """Wait until all that was told is stored. Raises FencedError."""
        return self._outbox.store(timeout_s=timeout_s)

    def begin(self, attempt: int) -> None:
        """Speak for the next attempt."""
        self._attempt = attempt
        self._outbox.begin(attempt)

    def view(self, state: JobState) -> JobView:
        """The job as its supervisors saw it."""
        return JobView(
            job=self._resume.job,
            state=state.word,
            spec=self._resume.spec.model_dump(mode="json"),
            steps=[*self._light, *self._whole],
            incidents=tuple(self._incidents),
            actions=tuple(self._actions),
            events=tuple(self._events),
            extra={
                "job_dir": self._resume.job_dir,
                RANK_PEAK: rank_peak_tokens_per_s(self._resume.spec),
            },
        )

    def write_report(self, state: JobState) -> None:
        """``summary.json`` and ``report.html`` in the job's directory, and W&B's end; once the
        job's end is stored, for whoever lost the job has nothing to say of it."""
        summary: dict[str, Any] | None = None
        try:
            folder = Path(self._resume.job_dir)
            summary = write_closing(self.view(state), folder, self._attempt)
        except Exception:
            # A full disk or a wrong number in a report is no reason to lose the job's end.
            logger.exception("the report of %s could not be written", self._resume.job)
        if self._run_log:
            self._run_log.finish(summary)

    def close(self) -> None:
        """Send what is left."""
        self._outbox.close()

    def _noted(self, notice: Notice, now: float) -> EventDraft:
        message = without(notice.message, self._secrets)
        logger.info("%s: %s", notice.kind, message)
        event = EventDraft(notice.kind, now, message, without_in(notice.detail, self._secrets))
        self._events.append(asdict(event))
        if event.kind in WRITTEN_OR_BACK:
            self._written.append(self._events[-1])
        return event
