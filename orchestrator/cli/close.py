"""Closing words: what became of a job, where everything lies, and how it goes on.

Promises: nothing is claimed that was not looked up; paths are whole; commands can be
pasted into a shell.
"""

from __future__ import annotations

import contextlib
import json
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TextIO

from monitoring.wording import at_step
from orchestrator.cli.show import Output, print_json
from orchestrator.lifecycle import Cause


def conclude(
    job: Mapping[str, Any], output: Output, told: TextIO, home: Path | None, slots: int
) -> None:
    """The summary, where everything lies, and the commands to go on with.

    ``home``: the controller's, where the job could go on from it. As JSON the summary goes
    to stdout alone, the rest to ``told`` where there is something to do.
    """
    folder = Path(job["job_dir"])
    summary: dict[str, Any] | None = None
    with contextlib.suppress(OSError, ValueError):
        summary = json.loads((folder / "summary.json").read_text())
    if output is Output.json:
        print_json(summary if summary is not None else job)
    else:
        for line in _whole(job, folder, summary):
            print(line, file=told)
    if home is not None:
        if output is Output.json:
            print(stands(job), file=told)
        print(f"directory {folder}", file=told)
        for line in going_on([job["id"]], home, slots):
            print(line, file=told)


def could_go_on(job: Mapping[str, Any]) -> bool:
    """Whether resuming could help: not where it is done, or never fits on this machine."""
    never = Cause.CAN_NEVER_FIT.value
    return job["state"] != "succeeded" and not job["reason"].startswith(never)


def stands(job: Mapping[str, Any]) -> str:
    """``toy-1a2b3c cancelled: …; its newest checkpoint is of step 40``."""
    reason = f": {job['reason'].rstrip('.')}" if job["reason"] else ""
    return f"{job['id']} {job['state']}{reason}; {saved(job)}"


def saved(job: Mapping[str, Any]) -> str:
    """What a job could go on from."""
    from launch.checkpoints import newest_checkpoint

    unseen: list[str] = []

    def note(folder: Path, error: OSError) -> None:
        unseen.append(f"{folder} can't be looked at: {error.strerror}")

    found = newest_checkpoint(Path(job["job_dir"]), unseen=note)
    if found is None and unseen:
        return f"whether it has a checkpoint is not known: {unseen[0]}"
    if found is None:
        return "it has no checkpoint, and would begin again"
    return f"its newest checkpoint is of step {found.step}"


def going_on(jobs: list[str], home: Path, slots: int | None = None) -> list[str]:
    """The commands with which ``jobs`` go on."""
    where = f" --home {shlex.quote(str(home))}"
    up = f"octavo up{f' --slots {slots}' if slots else ''}{where}"
    return ["go on with", f"    {up}", *(f"    octavo resume {job}{where}" for job in jobs)]


def _whole(job: Mapping[str, Any], folder: Path, summary: Mapping[str, Any] | None) -> list[str]:
    lines = [f"\n{job['id']} {job['state']}" + (f": {job['reason']}" if job["reason"] else "")]
    if summary is not None:
        lines += [f"  {key:<22} {_short(value)}" for key, value in summary.items()]
    if could_go_on(job):
        lines.append(f"  {'checkpoint':<22} {saved(job)}")
    for name, path in (
        ("summary", folder / "summary.json"),
        ("report", folder / "report.html"),
        ("logs", folder / "logs"),
    ):
        if path.exists():
            lines.append(f"{name:<9} {path}")
    return lines + _wandb(folder)


def _wandb(folder: Path) -> list[str]:
    """Each process that wrote the run has its own folder; together they are one run."""
    runs = wandb_folders(folder)
    lines = [f"{'W&B run' if i == 0 else '':<9} {run}" for i, run in enumerate(runs)]
    offline = [str(run) for run in runs if run.name.startswith("offline-")]
    if offline:
        lines.append(f"{'':<9} upload with: {shlex.join(['wandb', 'sync', *offline])}")
    return lines


def wandb_folders(folder: Path) -> list[Path]:
    """Folders of the job's W&B run, oldest first: one a supervisor."""
    return sorted({run.parent for run in (folder / "wandb").rglob("run-*.wandb")})


def _short(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, Mapping):
        return ", ".join(f"{name} {_short(part)}" for name, part in value.items()) or "none"
    if isinstance(value, list):
        if value and all(isinstance(v, dict) for v in value):
            return f"{len(value)}" + "".join(f"\n    - {_row(v)}" for v in value)
        return ", ".join(map(str, value)) if value else "none"
    return str(value)


def _row(value: Mapping[str, Any]) -> str:
    parts = [str(value.get("kind", ""))]
    if "step" in value:
        parts.append(at_step(value["step"]))
    if value.get("tier"):
        parts.append(f"to step {value['to_step']} from {value['tier']}")
    # What an action answers is in the incident above it.
    reason = str(value.get("reason") or "").partition(": ")[0]
    text = reason or value.get("message")
    return " ".join(parts) + (f": {text}" if text else "")
