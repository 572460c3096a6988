"""What a job's records become in its W&B run: steps, alerts, tables, notes, artifacts.

One job is one run, whatever restarts: what an earlier process logged is counted on, and not logged
again. Promises: a step takes a bounded number of bytes, however many tensors the model has; a pause
is told once, by its action or by the end; a checkpoint that W&B doesn't take costs its artifact and
nothing else. What else W&B raises goes through, and calls wait for W&B: whoever has steps to do
calls from another thread (``monitoring.wandb_run``).
"""

from __future__ import annotations

import logging
import math
import time
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from monitoring import metrics
from monitoring.heat_image import HeatImage
from monitoring.job_view import GOES_BACK, Row
from monitoring.records import StepRecord
from monitoring.secrets import masked
from monitoring.summary import Tally
from monitoring.utilization import RANK_PEAK
from monitoring.wandb_tables import wandb_tables
from monitoring.wording import at_step, counted, place

logger = logging.getLogger(__name__)

WORST_TENSORS = 8
"""Tensors with scalars of their own in each step."""
HISTOGRAMS_EVERY = 10
"""Steps from one histogram of all tensors to the next."""
HEAT_MAP_EVERY = 200
"""Steps from one heat map of all layers to the next; there is one after each trouble, too, and one
at the end. With the above, a step takes at most ``BYTES_A_STEP`` on average."""
BYTES_A_STEP = 8000
"""Bytes of W&B's files that a step of a model with 1,000 tensors takes at most, on average."""
HEAT_AFTER = 3
"""Steps after a trouble that its heat map has, too."""
MOST_NOTES = 40
"""Newest lines of the run's notes."""
REMEMBERED_STEPS = 4096
"""Steps whose attempt and timeline is known, for checkpoints that are written later."""

ALERT_WAIT_S = 1
"""Seconds in which W&B takes a second alert of the same title for the first; 0 means a minute."""
_SERIOUS = frozenset({"pause", "fail"})
"""Actions that raise an alert: the job needs a person, or one has stopped it."""


class WandbWriter:
    """Writes one job's records into its run; called by one thread at a time."""

    def __init__(self, job: str, spec: Row) -> None:
        self.job = job
        self._run: Any = None
        self._online = False
        self._tally = Tally()
        self._pause_told = False
        self._incidents: list[Row] = []
        self._actions: list[Row] = []
        self._step = 0
        self._tables_changed = False
        self._fp8_format = str((spec.get("fp8") or {}).get("format", "HYBRID"))
        self._rank_peak: float | None = spec.get(RANK_PEAK)
        self._ranks = int((spec.get("topology") or {}).get("ranks") or 0)
        self._heat = HeatImage()
        self._heat_due = HEAT_MAP_EVERY
        self._notes: list[str] = []
        self._marks: OrderedDict[int, tuple[int, int]] = OrderedDict()
        self._checkpoint: int | None = None
        self._start: Row = {}

    def go_on_from(
        self, steps: Sequence[StepRecord], incidents: Sequence[Row], actions: Sequence[Row]
    ) -> None:
        """Count what an earlier process of the job has logged, without logging it again."""
        for action in actions:
            self._tally.add_action(action)
            self._note(action)
        for record in steps:
            self._tally.add_step(record)
            self._heat.add(record)
            self._mark(record)
        self._incidents += incidents
        self._actions += actions

    def begin(self, run: Any, *, online: bool) -> None:
        """Write into ``run`` from now on."""
        self._run = run
        self._online = online

    def notes(self) -> str:
        """The run's notes: what went back so far, the newest last."""
        left = len(self._notes) - MOST_NOTES
        head = (
            [f"({left} earlier ones are in the table {metrics.ACTIONS_TABLE})"] if left > 0 else []
        )
        return "\n".join([*head, *self._notes[-MOST_NOTES:]])

    def write(self, kind: str, value: Any) -> None:
        """Write a ``step``, ``incident``, ``action``, ``config``, ``start``, ``checkpoint`` or
        ``finish``, with which the run ends."""
        getattr(self, f"_on_{kind}")(value)

    def _on_step(self, record: StepRecord) -> None:
        self._log_tables()
        self._tally.add_step(record)
        self._step = record.step
        self._mark(record)
        rise = self._heat.add(record)
        peak = self._rank_peak * self._ranks if self._rank_peak else None
        values: dict[str, Any] = {
            **metrics.step_metrics(record, WORST_TENSORS, self._fp8_format, peak)
        }
        values |= metrics.tally_metrics(self._tally)
        if rise is not None and math.isfinite(rise):
            values[metrics.WORST_RISE] = rise
        if record.step % HISTOGRAMS_EVERY == 0:
            values |= self._histograms(record)
        self._heat_due -= 1
        if self._heat_due <= 0:
            values |= self._heat_map()
        self._run.log(values)

    def _histograms(self, record: StepRecord) -> dict[str, Any]:
        import wandb

        told = metrics.histograms(record, self._fp8_format)
        return {name: wandb.Histogram(np_histogram=made) for name, made in told.items()}

    def _heat_map(self) -> dict[str, Any]:
        import wandb

        self._heat_due = HEAT_MAP_EVERY
        page = self._heat.html()
        if not page:
            return {}
        return {metrics.HEAT_MAP: wandb.Html(page, inject=False, data_is_not_path=True)}

    def _on_config(self, values: Row) -> None:
        self._run.config.update(masked(dict(values)), allow_val_change=True)

    def _on_start(self, start: Row) -> None:
        self._start = start
        self._ranks = int(start.get("ranks") or self._ranks)
        if self._online and start.get("tier") == "disk":
            # Lineage: W&B draws what an attempt went on from. Offline there is nobody to ask.
            try:
                self._run.use_artifact(f"{self.job}-checkpoint:step-{start['step']}")
            except Exception as error:  # noqa: BLE001 - of a checkpoint that W&B doesn't know
                logger.info("no artifact of step %s: %s", start["step"], error)

    def _on_checkpoint(self, told: tuple[int, Path]) -> None:
        import wandb

        step, folder = told
        attempt, timeline = self._marks.get(step - 1, (self._tally.attempt, self._tally.timeline))
        lineage = {
            "job": self.job,
            "step": step,
            "attempt": attempt,
            "timeline": timeline,
            "attempt_began_at_step": self._start.get("step"),
            "attempt_began_from": self._start.get("tier"),
            "checkpoint_before": self._checkpoint,
        }
        artifact = wandb.Artifact(
            f"{self.job}-checkpoint",
            type="checkpoint",
            description=f"Step {step} of attempt {attempt}, timeline {timeline}",
            metadata=lineage,
        )
        aliases = ["latest", f"step-{step}", f"attempt-{attempt}", f"timeline-{timeline}"]
        try:
            # Files of the same paths are the same version to W&B; after a rollback they are not.
            name = f"attempt-{attempt}-timeline-{timeline}/{folder.name}"
            artifact.add_reference(folder.absolute().as_uri(), name=name, checksum=False)
            self._run.log_artifact(artifact, aliases=aliases)
        except Exception as error:  # noqa: BLE001 - it may have been deleted for newer ones
            # No reason to do without the rest.
            logger.info("no artifact of the checkpoint of step %d: %s", step, error)
            return
        self._checkpoint = step

    def _on_incident(self, incident: Row) -> None:
        self._incidents.append(incident)
        self._run.alert(
            title=f"{self.job}: {incident['kind'].replace('_', ' ')} {at_step(incident['step'])}",
            text=incident["message"],
            level="WARN",
            wait_duration=ALERT_WAIT_S,
        )
        self._tables_changed = True

    def _on_action(self, action: Row) -> None:
        self._tally.add_action(action)
        self._actions.append(action)
        self._heat_due = min(self._heat_due, HEAT_AFTER)
        if self._note(action):
            self._run.notes = self.notes()
        self._pause_told |= action["kind"] == "pause"
        if action["kind"] in _SERIOUS:
            self._run.alert(
                title=f"{self.job}: {action['kind']} {at_step(action['step'])}",
                text=action["reason"],
                # Who paused it knows; whoever watches learns.
                level="INFO" if action.get("asked") else "ERROR",
                wait_duration=ALERT_WAIT_S,
            )
        self._tables_changed = True

    def _on_finish(self, summary: Row) -> None:
        self._log_tables()
        if self._heat_due < HEAT_MAP_EVERY and (heat := self._heat_map()):
            self._run.log({metrics.STEP: self._step, **heat})
        self._tell_end(summary)
        for key, value in summary.items():
            if isinstance(value, (int, float, str)):
                self._run.summary[f"job/{key}"] = value
        self._run.finish(exit_code=0 if summary.get("state", "succeeded") == "succeeded" else 1)

    def _tell_end(self, summary: Row) -> None:
        """An alert of how the job ended, or came to rest; of most pauses their action has told."""
        state = summary.get("state")
        if state is None or (state == "paused" and self._pause_told):
            return
        steps, planned = summary.get("steps"), summary.get("steps_planned")
        of = f" of {planned}" if planned is not None else ""
        loss = summary.get("final_loss")
        self._run.alert(
            title=f"{self.job}: {state}",
            text=(f"{steps}{of} steps" if of else counted(steps or 0, "step"))
            + (f", loss {loss:.4g}" if isinstance(loss, float) else ""),
            level={"failed": "ERROR", "paused": "WARN"}.get(state, "INFO"),
            wait_duration=ALERT_WAIT_S,
        )

    def _note(self, action: Row) -> bool:
        """Keep what went back for the run's notes; whether it did."""
        if action["kind"] not in GOES_BACK:
            return False
        when = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(float(action["time"])))
        to = action.get("to_step")
        where = f" to step {to}" if to is not None else ""
        words = str(action["kind"]).replace("_", " ")
        seen = place(action["step"])
        self._notes.append(f"{when}, {seen}: {words}{where}. {action['reason']}")
        return True

    def _mark(self, record: StepRecord) -> None:
        self._marks[record.step] = (record.attempt, record.timeline)
        self._marks.move_to_end(record.step)
        if len(self._marks) > REMEMBERED_STEPS:
            self._marks.popitem(last=False)

    def _log_tables(self) -> None:
        if self._tables_changed:
            self._tables_changed = False
            tables = wandb_tables(self._incidents, self._actions)
            self._run.log({metrics.STEP: self._step, **tables})
