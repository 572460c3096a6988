"""The job's Weights & Biases run, written from a thread of its own.

The supervisor hands over records, incidents and actions; a call never blocks and never
raises. One job is one run, whatever restarts: its id is the job's, and it is resumed.

Promises: W&B never stops training. An exception of W&B disables it with one warning; a
service that can't be reached turns the run offline; a queue that is full drops records
and says how many. What was logged more than a second ago survives a kill of the process.

The job's processes must not be logged in to be recorded: mode ``auto`` looks for a key in
the environment and in ``.netrc``, without a network call, and is offline without one.
"""

from __future__ import annotations

import logging
import netrc
import os
import queue
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from monitoring import metrics
from monitoring.config import WandbConfig
from monitoring.job_view import Row
from monitoring.records import StepRecord
from monitoring.summary import Tally

logger = logging.getLogger(__name__)

FLUSH_INTERVAL_S = 0.2
"""W&B's own default of 15 s is what a killed process would lose."""
QUEUE_LIMIT = 10_000
INIT_TIMEOUT_S = 30.0
WORST_TENSORS = 8
"""Tensors with scalars of their own in each step."""

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
    for place in places:
        try:
            if place.is_file() and netrc.netrc(place).authenticators(host):
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
        self.spec = spec
        self.mode = resolve_mode(config)
        self.dropped = 0
        """Entries that found the queue full."""
        self._queue: queue.Queue[tuple[str, Any] | None] = queue.Queue(QUEUE_LIMIT)
        self._disabled = self.mode == "disabled"
        self._thread = threading.Thread(target=self._main, name=f"wandb-{job}", daemon=True)
        self._run: Any = None
        self._tally = Tally()
        self._incidents: list[Row] = []
        self._actions: list[Row] = []
        self._step = 0
        self._tables_changed = False
        self._fp8_format = str((spec.get("fp8") or {}).get("format", "HYBRID"))

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
        for record in steps:
            self._tally.add_step(record)
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
        settings = wandb.Settings(
            silent=True,
            console="off",
            disable_git=True,
            disable_code=True,
            x_disable_stats=True,
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
        values = metrics.step_metrics(record, WORST_TENSORS, self._fp8_format)
        self._run.log(values | metrics.tally_metrics(self._tally))

    def _on_config(self, values: Row) -> None:
        self._run.config.update(dict(values), allow_val_change=True)

    def _on_incident(self, incident: Row) -> None:
        self._incidents.append(incident)
        self._run.alert(
            title=f"{self.job}: {incident['kind'].replace('_', ' ')} at step {incident['step']}",
            text=incident["message"],
            level="WARN",
            wait_duration=0,
        )
        self._tables_changed = True

    def _on_action(self, action: Row) -> None:
        self._tally.add_action(action)
        self._actions.append(action)
        if action["kind"] in _SERIOUS:
            self._run.alert(
                title=f"{self.job}: {action['kind']} at step {action['step']}",
                text=action["reason"],
                # Who paused it knows; whoever watches learns.
                level="INFO" if action.get("asked") else "ERROR",
                wait_duration=0,
            )
        self._tables_changed = True

    def _on_finish(self, summary: Row) -> None:
        self._log_tables()
        for key, value in summary.items():
            if isinstance(value, (int, float, str)):
                self._run.summary[f"job/{key}"] = value
        self._run.finish(exit_code=0 if summary.get("state", "succeeded") == "succeeded" else 1)

    def _log_tables(self) -> None:
        if not self._tables_changed:
            return
        self._tables_changed = False
        import wandb

        incidents = wandb.Table(
            columns=["step", "onset", "kind", "message", "suspects"],
            data=[_incident_row(row) for row in self._incidents],
        )
        actions = wandb.Table(
            columns=["step", "kind", "to_step", "reason", "precision", "passed_over", "asked_by"],
            data=[_action_row(row) for row in self._actions],
        )
        ledger = wandb.Table(
            columns=["batch", "step", "kind", "asked_by", "reason"],
            data=[row for action in self._actions for row in _ledger_rows(action)],
        )
        self._run.log(
            {
                metrics.STEP: self._step,
                metrics.SKIP_LEDGER_TABLE: ledger,
                metrics.INCIDENTS_TABLE: incidents,
                metrics.ACTIONS_TABLE: actions,
            }
        )


def _incident_row(row: Row) -> list[Any]:
    suspects = ", ".join(suspect["layer"] for suspect in row.get("suspects", ()))
    return [row["step"], row["onset_step"], row["kind"], row["message"], suspects]


def _ledger_rows(row: Row) -> list[list[Any]]:
    """The batches that an action left out, one a row, and why: W&B can sort and filter them."""
    by = (row.get("asked") or {}).get("by", "")
    why = [row["step"], row["kind"], by, row["reason"]]
    return [[batch, *why] for batch in row.get("skip_batches", ())]


def _action_row(row: Row) -> list[Any]:
    moved = dict(row.get("precision", {}))
    if row.get("exchange") is not None:
        moved["gradient exchange"] = row["exchange"]
    precision = ", ".join(f"{k} → {v}" for k, v in moved.items())
    passed = "; ".join(f"{p['rung']}: {p['why']}" for p in row.get("passed_over", ()))
    to_step = row.get("to_step")
    return [
        row["step"],
        row["kind"],
        "" if to_step is None else str(to_step),
        row["reason"],
        precision,
        passed,
        (row.get("asked") or {}).get("by", ""),
    ]
