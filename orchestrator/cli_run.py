"""``octavo run``, ``up`` and ``down``: a controller and a Ray of the command's own.

``run`` promises that all it started has ended when it returns, also on Ctrl-C, a
SIGTERM, or when it is killed itself (the host ends with it).
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn, TextIO

from orchestrator.cli_show import (
    INTERRUPTED,
    Output,
    complain,
    exit_code,
    print_json,
)
from orchestrator.cli_watch import follow
from orchestrator.client import Client, ClientError
from orchestrator.home import Home, HomeConfig
from orchestrator.local import LocalError, Starting, end_host, running_host
from orchestrator.node_groups import need_of
from orchestrator.spec import JobSpec, load_spec, spec_data
from orchestrator.spec_errors import Problem, SpecError

CANCEL_S = 20.0
"""Seconds that an interrupted job has to save a checkpoint and its summary."""
FEWEST_SLOTS = 4


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
    home = Home(folder / f".octavo-{secrets.token_hex(4)}")
    home.create(HomeConfig(jobs_dir=folder))
    host: Starting | None = None
    try:
        with _interruptible():
            print(f"{spec.name}: starting a local Ray", file=told, flush=True)
            host = Starting(home, need_of(spec).slots, tied=True)
            host.wait()
            return _follow_to_end(Client.of_home(home), spec, str(file), host, output, told)
    except KeyboardInterrupt:
        return INTERRUPTED
    except LocalError as error:
        complain(str(error))
        return 1
    finally:
        with _uninterruptible():
            if host is not None:
                host.end()
            if not keep_home:
                shutil.rmtree(home.path, ignore_errors=True)


def bring_up(home: Home, slots: int | None, standby: int | None, output: Output) -> int:
    """Start the host of ``home``, or find it running; the exit code."""
    found = running_host(home)
    wanted = slots or max(FEWEST_SLOTS, os.cpu_count() or 1)
    if found is None:
        home.create(
            None if standby is None else home.config().model_copy(update={"standby": standby})
        )
        try:
            Starting(home, wanted, tied=False).wait()
        except LocalError as error:
            complain(str(error))
            return 1
        found = running_host(home)
        assert found is not None, "a host writes its record before it says ready"
    elif slots is not None and found.slots != slots:
        complain(f"it runs with {found.slots} slots", "`octavo down` first to change that")
        return 1
    elif standby is not None and home.config().standby != standby:
        now = home.config().standby
        complain(f"it runs with {now} standby workers", "`octavo down` first to change that")
        return 1
    if output is Output.json:
        print_json({"url": found.url, "slots": found.slots, "home": str(home.path)})
    else:
        print(f"controller at {found.url}, {found.slots} slots, home {home.path}")
    return 0


def bring_down(home: Home) -> int:
    """End the host of ``home`` and all that it started; the exit code."""
    host = running_host(home)
    if host is None:
        print(f"nothing runs in {home.path}")
        return 0
    with contextlib.suppress(ClientError):
        client = Client.of_home(home)
        going = [j["id"] for j in client.jobs() if not j["settled"]]
        if going:
            print(f"{', '.join(going)} will go on at the next `octavo up`")
    end_host(host, home)
    print("ended")
    return 0


def _follow_to_end(
    client: Client, spec: JobSpec, file: str, host: Starting, output: Output, told: TextIO
) -> int:
    job = client.submit(spec_data(spec), file)

    def check_host() -> None:
        if not host.alive():
            raise LocalError("the local Ray has ended")

    try:
        state = follow(client, job["id"], to=told, each=check_host)
    except KeyboardInterrupt:
        _cancel(client, job["id"], told)
        raise
    _conclude(client.job(job["id"]), output, told)
    return exit_code(state)


def _cancel(client: Client, job: str, told: TextIO) -> None:
    """Let the job save what it can; a second Ctrl-C cuts that short."""
    print(f"ending {job}; again to end it at once", file=told, flush=True)
    with contextlib.suppress(ClientError, KeyboardInterrupt):
        client.cancel(job, "interrupted")
        deadline = time.monotonic() + CANCEL_S
        while not client.job(job)["settled"] and time.monotonic() < deadline:
            time.sleep(0.1)


def _conclude(job: dict[str, Any], output: Output, told: TextIO) -> None:
    """The summary and where everything lies."""
    folder = Path(job["job_dir"])
    summary: dict[str, Any] | None = None
    with contextlib.suppress(OSError, ValueError):
        summary = json.loads((folder / "summary.json").read_text())
    if output is Output.json:
        print_json(summary if summary is not None else job)
        return
    print(f"\n{job['id']} {job['state']}" + (f": {job['reason']}" if job["reason"] else ""))
    if summary is not None:
        for key, value in summary.items():
            print(f"  {key:<18} {_short(value)}")
    for name, path in (
        ("summary", folder / "summary.json"),
        ("report", folder / "report.html"),
        ("W&B run", _wandb_dir(folder)),
        ("logs", folder / "logs"),
    ):
        if path is not None and path.exists():
            print(f"{name:<8} {path}")


def _wandb_dir(folder: Path) -> Path | None:
    """The folder of the job's W&B run."""
    runs = sorted((folder / "wandb").rglob("run-*.wandb"))
    return runs[-1].parent if runs else None


def _short(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, list):
        if value and all(isinstance(v, dict) for v in value):
            return f"{len(value)}" + "".join(f"\n    - {_row(v)}" for v in value)
        return ", ".join(map(str, value)) if value else "none"
    return str(value)


def _row(value: dict[str, Any]) -> str:
    parts = [str(value.get("kind", ""))]
    if "step" in value:
        parts.append(f"at step {value['step']}")
    text = value.get("reason") or value.get("message")
    return " ".join(parts) + (f": {text}" if text else "")


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


@contextlib.contextmanager
def _interruptible() -> Iterator[None]:
    """SIGTERM and SIGHUP end a command as Ctrl-C does."""

    def interrupt(*_: object) -> NoReturn:
        raise KeyboardInterrupt

    numbers = (signal.SIGTERM, signal.SIGHUP, signal.SIGINT)
    before = {number: signal.signal(number, interrupt) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def _uninterruptible() -> Iterator[None]:
    """Cleaning up is finished, whatever is pressed; a SIGKILL still leaves it to the host."""
    numbers = (signal.SIGTERM, signal.SIGHUP, signal.SIGINT)
    before = {number: signal.signal(number, signal.SIG_IGN) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
