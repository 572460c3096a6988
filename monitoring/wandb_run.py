"""The job's Weights & Biases run, written from a thread of its own.

The supervisor hands over records, incidents and actions; a call never blocks and never
raises. One job is one run, whatever restarts: its id is the job's, and it is resumed. What is
written into it is ``monitoring.wandb_writer``'s.

Promises: W&B never stops training. An exception of W&B disables it with one warning; a
service that can't be reached turns the run offline; a queue that is full drops records
and says how many. What was logged more than a second ago survives a kill of the process; all that
waits for an upload is in the job's directory.

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
from monitoring.secrets import masked
from monitoring.wandb_writer import WandbWriter

logger = logging.getLogger(__name__)

FLUSH_INTERVAL_S = 0.2
"""W&B's own default of 15 s is what a killed process would lose."""
QUEUE_LIMIT = 10_000
INIT_TIMEOUT_S = 30.0


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
        self._writer = WandbWriter(job, spec)

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
        self._writer.go_on_from(steps, incidents, actions)
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
            self._writer.begin(self._run, online=self.mode == "online")
            while (entry := self._queue.get()) is not None:
                kind, value = entry
                self._writer.write(kind, value)
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
            notes=self._writer.notes() or None,
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
