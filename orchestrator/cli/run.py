"""``octavo run``: one job on a controller and a Ray of the command's own.

Promises: all that it started has ended when it returns, also on Ctrl-C, a SIGTERM, or when
it is killed itself (the host ends with it); its last words say where the job stands.
"""

from __future__ import annotations

import contextlib
import shlex
import sys
import tempfile
from pathlib import Path
from typing import Any, TextIO

from orchestrator.api.client import Client
from orchestrator.api.client_errors import ClientError
from orchestrator.api.stops import Stops
from orchestrator.cli.close import conclude, could_go_on, going_on
from orchestrator.cli.interrupts import Interrupted, interruptible, uninterruptible
from orchestrator.cli.show import CommandError, Output, exit_code
from orchestrator.cli.watch import follow
from orchestrator.cluster.local import LocalError, Starting
from orchestrator.cluster.private_home import PrivateHome, sweep
from orchestrator.placement.placement import need_of
from orchestrator.spec.errors import Problem, SpecError
from orchestrator.spec.job import JobSpec, load_spec, spec_data


def run_job(file: Path, out: Path | None, *, keep_home: bool, output: Output) -> int:
    """Run the job of ``file`` on a Ray of its own; the exit code."""
    spec = load_spec(file)
    folder = _writable_folder(spec, out, str(file))
    if out is not None and spec.checkpoint.storage_path is not None:
        # The command line is nearer than the file.
        checkpoint = spec.checkpoint.model_copy(update={"storage_path": None})
        spec = spec.model_copy(update={"checkpoint": checkpoint})
    # What is asked for on stdout is the summary alone where it is JSON.
    told = sys.stderr if output is Output.json else sys.stdout
    for left in sweep(folder):
        word = f"octavo up --home {shlex.quote(str(left))}"
        print(f"a run that was killed left its job behind; it goes on with: {word}", file=told)
    work = _Work(spec, str(file), PrivateHome(folder, keep=keep_home), told)
    ended: Interrupted | LocalError | None = None
    home: Path | None = None
    try:
        with interruptible():
            work.run()
    except (Interrupted, LocalError) as error:
        ended = error
    finally:
        with uninterruptible():
            home = work.end()
    slots = need_of(spec).slots
    if isinstance(ended, LocalError):
        remedy = "\n".join(going_on([work.job["id"]], home, slots)) if work.job and home else ""
        raise CommandError(str(ended), remedy)
    if work.job is None:
        assert ended is not None, "a run without a job was interrupted"
        raise CommandError(f"{ended.word} before the job was submitted", code=ended.code)
    conclude(work.job, output, told, home, slots)
    if keep_home:
        where = shlex.quote(str(work.home))
        print(f"store     octavo replay {work.job['id']} --home {where}", file=told)
    return ended.code if ended else exit_code(work.job["state"])


class _Work:
    """What ``octavo run`` holds while it runs."""

    def __init__(self, spec: JobSpec, file: str, private: PrivateHome, told: TextIO) -> None:
        self.job: dict[str, Any] | None = None
        """The job as last seen; None before it was submitted."""
        self._spec = spec
        self._file = file
        self._private = private
        self._told = told
        self._host: Starting | None = None

    @property
    def home(self) -> Path:
        """The folder of its controller."""
        return self._private.home.path

    def run(self) -> None:
        """From the start of Ray until the job is settled.

        Raises ``Interrupted``, after the job had time to save what it can, or ``LocalError``.
        """
        print(f"{self._spec.name}: starting a local Ray", file=self._told, flush=True)
        self._host = Starting(self._private.home, need_of(self._spec).slots, tied=True)
        self._host.wait()
        client = Client.of_home(self._private.home)
        self.job = client.submit(spec_data(self._spec), self._file)
        self._private.belongs_to(Path(self.job["job_dir"]))
        try:
            follow(client, self.job["id"], to=self._told, each=self._check_host)
        except Interrupted as interrupted:
            self._cancel(client, self.job["id"], interrupted.word)
            raise
        self.job = client.patiently(client.job, self.job["id"])

    def end(self) -> Path | None:
        """End Ray and put the home away; where it lies if the job could go on from it."""
        if self._host is not None:
            self._host.end()
        needed = self.job is not None and could_go_on(self.job)
        place = self._private.leave(needed=needed)
        return place if needed else None

    def _check_host(self) -> None:
        assert self._host is not None
        if not self._host.alive():
            raise LocalError("the local Ray has ended")

    def _cancel(self, client: Client, job: str, reason: str) -> None:
        """Let the job save what it can; a second Ctrl-C cuts that short."""
        print(f"ending {job} after a checkpoint; again to end it at once", file=self._told)
        assert self.job is not None and self._host is not None, "it was submitted"
        host = self._host
        stops = Stops(
            client,
            {job: self.job},
            asked=[job],
            order=lambda job: client.cancel(job, reason),
            gone=lambda: not host.alive(),
        )
        with contextlib.suppress(ClientError, KeyboardInterrupt):
            stops.wait()
        self.job = stops.jobs[job]
        if stops.going_on():
            word = f"{job} was ended before its last checkpoint was written"
            print(word, file=self._told)


def _writable_folder(spec: JobSpec, out: Path | None, file: str) -> Path:
    """The folder for the job's directory, made and tried; ``SpecError`` before anything starts."""
    folder = (out or spec.checkpoint.storage_path or Path("runs")).absolute()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        key = "checkpoint.storage_path" if out is None else "--out"
        message = f"can't be written to: {error.strerror or error}"
        remedy = "name another folder with --out"
        raise SpecError([Problem(file, key, str(folder), message, remedy)]) from None
    return folder
