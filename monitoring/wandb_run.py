"""The job's Weights & Biases run, written from a thread of its own.

The supervisor hands over records, incidents and actions; a call never blocks and never
raises. One job is one run, whatever restarts: its id is the job's, and it is resumed.

Promises: W&B never stops training. An exception of W&B disables it with one warning; a
service that can't be reached turns the run offline; a queue that is full drops records
and says how many. What was logged more than a second ago survives a kill of the process; all that
waits for an upload is in the job's directory.

The job's processes must not be logged in to be recorded: mode ``auto`` looks for a key in
the environment and in ``.netrc``, without a network call, and is offline without one.
"""

from __future__ import annotations

import logging
import math
import netrc
import os
import queue
import threading
import time
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from monitoring import metrics
from monitoring.config import WandbConfig
from monitoring.heat_image import HeatImage
from monitoring.job_view import GOES_BACK, Row
from monitoring.records import StepRecord
from monitoring.secrets import masked
from monitoring.summary import Tally
from monitoring.utilization import RANK_PEAK
from monitoring.wandb_tables import wandb_tables
from monitoring.wording import at_step, counted, place

logger = logging.getLogger(__name__)

FLUSH_INTERVAL_S = 0.2
"""W&B's own default of 15 s is what a killed process would lose."""
QUEUE_LIMIT = 10_000
INIT_TIMEOUT_S = 30.0
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


def logged_in(environ: Mapping[str, str] | None = None) -> bool:
    """Whether a W&B key is at hand: in WANDB_API_KEY, or in .netrc for the configured host."""
    env = os.environ if environ is None else environ
    if env.get("WANDB_API_KEY"):
        return True
    host = urlsplit(env.get("WANDB_BASE_URL", "https://api.wandb.ai")).hostname or ""
    home = Path(env.get("HOME", "~")).expanduser()
    named = env.get("NETRC")
    places = [Path(named).expanduser()] if named else [home / ".netrc", home / "_netrc"]
    for file in places:
        try:
            if file.is_file() and netrc.netrc(file).authenticators(host):
                return True
        except (netrc.NetrcParseError, OSError):
            continue
    return False


def resolve_mode(config: WandbConfig, environ: Mapping[str, str] | None = None) -> str:
    """``online``, ``offline`` or ``disabled``. ``auto`` follows WANDB_MODE, else the login."""
    if config.mode != "auto":
        return config.mode
    env = os.environ if environ is None else environ
    asked = env.get("WANDB_MODE", "")
    if asked in ("online", "offline", "disabled"):
        return asked
    return "online" if logged_in(env) else "offline"


class WandbRun:
    """One job's run; thread-safe, silent, and harmless when W&B is not well."""

    def __init__(self, config: WandbConfig, job: str, directory: Path, spec: Row) -> None:
        """``directory``: the job's; the run lies in ``wandb/`` below it. ``spec``: shown as the
        run's configuration."""
        self.config = config
        self.job = job
        self.directory = directory
        self.spec = masked(spec)
        self.mode = resolve_mode(config)
        self.dropped = 0
        """Entries that found the queue full."""
        self._queue: queue.Queue[tuple[str, Any] | None] = queue.Queue(QUEUE_LIMIT)
        self._disabled = self.mode == "disabled"
        self._thread = threading.Thread(target=self._main, name=f"wandb-{job}", daemon=True)
        self._run: Any = None
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

    @property
    def disabled(self) -> bool:
        """Nothing is recorded (any more): by configuration, or after an error of W&B."""
        return self._disabled

    def start(
        self,
        steps: Sequence[StepRecord] = (),
        incidents: Sequence[Row] = (),
        actions: Sequence[Row] = (),
    ) -> None:
        """Begin to write. What an earlier process of the job logged already is passed, so that
        totals and tables go on from it; it is not logged again."""
        for action in actions:
            self._tally.add_action(action)
            self._note(action)
        for record in steps:
            self._tally.add_step(record)
            self._heat.add(record)
            self._mark(record)
        self._incidents += incidents
        self._actions += actions
        if not self._disabled:
            self._thread.start()

    def log_step(self, record: StepRecord) -> None:
        self._put("step", record)

    def log_incident(self, incident: Row) -> None:
        """``Incident.to_json()``; also raised as an alert."""
        self._put("incident", incident)

    def log_action(self, action: Row) -> None:
        """``Action.to_json()``; before the records that follow it."""
        self._put("action", action)

    def log_config(self, values: Row) -> None:
        """More of the run's configuration, known only now; replaces what is there."""
        self._put("config", dict(values))

    def log_start(self, start: Row) -> None:
        """An attempt begins: its number, and the step and tier (``memory``, ``disk``, ``seed``)
        of the state it begins with."""
        self._put("start", dict(start))

    def log_checkpoint(self, step: int, folder: Path) -> None:
        """A checkpoint is complete; told of as a reference, its files stay where they are."""
        self._put("checkpoint", (step, folder))

    def finish(self, summary: Row | None = None, timeout: float = 20.0) -> bool:
        """Write what is queued and end the run; False when it took longer than ``timeout``
        seconds (it then goes on in the background, and what is on disk can be synced)."""
        if not self._thread.is_alive():
            return True
        deadline = time.monotonic() + timeout
        try:
            self._queue.put(("finish", dict(summary or {})), timeout=timeout)
        except queue.Full:
            return False
        self._thread.join(max(0.0, deadline - time.monotonic()))
        done = not self._thread.is_alive()
        if not done:
            logger.warning("W&B did not end within %.0f s; its files are in %s", timeout, self.path)
        return done

    @property
    def path(self) -> Path:
        """Folder of the run's files, of all its processes."""
        return self.directory / "wandb"

    def _put(self, kind: str, value: Any) -> None:
        if self._disabled:
            return
        try:
            self._queue.put_nowait((kind, value))
        except queue.Full:
            self.dropped += 1
            if self.dropped == 1:
                logger.warning("W&B is too slow; records are left out of its run")

    def _main(self) -> None:
        try:
            self._run = self._open()
            while (entry := self._queue.get()) is not None:
                kind, value = entry
                getattr(self, f"_on_{kind}")(value)
                if kind == "finish":
                    return
        except Exception as error:  # noqa: BLE001  whatever W&B raises, training goes on
            self._disabled = True
            logger.warning("W&B is off for job %s: %s: %s", self.job, type(error).__name__, error)
            self._abandon()

    def _open(self) -> Any:
        import wandb

        # Else tables wait for their upload in the home of whoever runs this, and who copies or
        # syncs the job's folder doesn't have them.
        os.environ["WANDB_DATA_DIR"] = str(self.path / "data")
        self.directory.mkdir(parents=True, exist_ok=True)
        try:
            run = self._init(wandb, self.mode)
        except Exception as error:
            if self.mode != "online":
                raise
            logger.warning("W&B can't be reached (%s); the run is kept offline", error)
            self.mode = "offline"
            run = self._init(wandb, self.mode)
        run.define_metric(metrics.STEP, hidden=True)
        for prefix in metrics.PREFIXES:
            run.define_metric(prefix, step_metric=metrics.STEP)
        return run

    def _init(self, wandb: Any, mode: str) -> Any:
        if mode == "offline":
            # Its service tells W&B how it fares, offline too.
            os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
        settings = wandb.Settings(
            silent=True,
            console="off",
            disable_git=True,
            disable_code=True,
            x_disable_stats=True,
            # Its metadata have the command line, and Ray's has a password in it.
            x_disable_meta=True,
            x_disable_machine_info=True,
            program="octavo",
            init_timeout=INIT_TIMEOUT_S,
            finish_timeout=15.0,
            x_transaction_log_flush_interval=FLUSH_INTERVAL_S,
        )
        return wandb.init(
            project=self.config.project,
            entity=self.config.entity,
            tags=list(self.config.tags) or None,
            id=self.job,
            name=self.job,
            resume="allow",
            mode=mode,
            dir=str(self.directory),
            config=dict(self.spec),
            notes=self._told_notes() or None,
            reinit="create_new",
            settings=settings,
        )

    def _abandon(self) -> None:
        """Let go of a run that failed, without hope and without waiting."""
        run, self._run = self._run, None
        if run is not None:
            try:
                run.finish(exit_code=1)
            except Exception:
                logger.debug("W&B could not be ended either", exc_info=True)

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
        if self.mode == "online" and start.get("tier") == "disk":
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
            self._run.notes = self._told_notes()
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

    def _told_notes(self) -> str:
        left = len(self._notes) - MOST_NOTES
        head = (
            [f"({left} earlier ones are in the table {metrics.ACTIONS_TABLE})"] if left > 0 else []
        )
        return "\n".join([*head, *self._notes[-MOST_NOTES:]])

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
