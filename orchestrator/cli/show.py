"""How the CLI shows things: tables for people, JSON for programs, errors with a remedy.

Promises: what users and runs wrote is never read as markup; colours only on a terminal;
JSON is one document on stdout, or one object a line where it goes on; an error is then one
object on stderr, so that stdout never holds anything else.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Mapping, Sequence
from enum import StrEnum
from typing import Any

from monitoring.clock import clock, day, moment, zone
from monitoring.wording import counted
from orchestrator.cli.tables import plain, print_table
from orchestrator.spec.errors import Problem

EXIT_CODES = {"succeeded": 0, "failed": 100, "cancelled": 103}
NOT_FINISHED = 101
NOT_FOUND = 102
FAILED = 1
USAGE = 2
UNREACHABLE = 3
INTERRUPTED = 130
"""Ctrl-C; 143 for SIGTERM."""


class Output(StrEnum):
    """What ``-o`` takes."""

    table = "table"
    json = "json"


def exit_code(state: str) -> int:
    """The exit code that tells a job's state; 101 for one that goes on or is paused."""
    return EXIT_CODES.get(state, NOT_FINISHED)


def print_json(value: object) -> None:
    """One document."""
    print(json.dumps(value, indent=2))


def print_json_line(value: object) -> None:
    """One of many objects, at once."""
    print(json.dumps(value, separators=(",", ":")), flush=True)


class CommandError(Exception):
    """Why a command gives up: what, what to do about it, the exit code, problems of a file, and
    what an ambiguous name could mean."""

    def __init__(
        self,
        message: str,
        remedy: str = "",
        code: int = 1,
        problems: Sequence[Problem] = (),
        candidates: Sequence[str] = (),
    ) -> None:
        super().__init__(message, remedy, code, tuple(problems), tuple(candidates))
        self.message = message
        self.remedy = remedy
        self.code = code
        self.problems = tuple(problems)
        self.candidates = tuple(candidates)

    def __str__(self) -> str:
        return self.message

    @classmethod
    def of_spec(cls, problems: Sequence[Problem]) -> CommandError:
        """A job file that can't be run."""
        count = len(problems)
        message = f"{count} problem{'s' * (count != 1)}; nothing was started"
        return cls(message, code=USAGE, problems=problems)

    def to_json(self) -> dict[str, Any]:
        """As the HTTP API tells errors, with the exit code and the remedy."""
        return {
            "error": self.message,
            "remedy": self.remedy,
            "exit_code": self.code,
            "problems": [problem.to_json() for problem in self.problems],
            "candidates": list(self.candidates),
        }


def complain(error: CommandError, output: Output) -> None:
    """An error on stderr: in lines for a person, or as one object in one line."""
    if output is Output.json:
        print(json.dumps(error.to_json(), separators=(",", ":")), file=sys.stderr)
        return
    for problem in error.problems:
        print(problem, file=sys.stderr)
    print(f"octavo: {error.message}", file=sys.stderr)
    for line in error.remedy.splitlines():
        print(f"        {line}", file=sys.stderr)


def print_jobs(
    jobs: Sequence[Mapping[str, Any]], now: float | None = None, width: int | None = None
) -> None:
    """A table of jobs, ``width`` columns wide: by default the terminal's, in a pipe any number.

    Where the room is scarce the reasons are cut; `octavo status` has them whole.
    """
    rows = [("JOB", "STATE", "STEP", "LOSS", "ATTEMPT", "AGE", "REASON")]
    rows += [
        (
            job["id"],
            job["state"],
            progress(job),
            "–" if job["loss"] is None else f"{job['loss']:.4f}",
            str(job["attempt"] or "–"),
            age((now or time.time()) - job["submitted_at"]),
            job["reason"],
        )
        for job in jobs
    ]
    print_table(rows, flexible=("REASON",), width=width)


def print_job(job: Mapping[str, Any]) -> None:
    """One job in full, without its spec."""
    rows = {
        "job": job["id"],
        "state": job["state"],
        "reason": job["reason"],
        "step": progress(job),
        "checkpoint": _checkpoint(job),
        "loss": "" if job["loss"] is None else f"{job['loss']:.4f}",
        "attempt": job["attempt"] or "",
        "timeline": job["timeline"] or "",
        "priority": job["priority"] or "",
        "linears": ": ".join(
            job[key] for key in ("backend", "backend_reason", "backend_warning") if job.get(key)
        ),
        "file": job["file"],
        "directory": job["job_dir"],
        "submitted": moment(job["submitted_at"]),
        "started": moment(job["started_at"]) if job["started_at"] else "",
        "ended": moment(job["ended_at"]) if job["ended_at"] else "",
        "nodes": ", ".join(
            f"{n['node_ip']} ({'spare' if n.get('spare') else counted(n['slots'], 'slot')})"
            for n in job["nodes"]
        ),
    }
    for name, value in rows.items():
        if value not in ("", None):
            print(f"{name:<10} {plain(str(value))}")


def _checkpoint(job: Mapping[str, Any]) -> str:
    """What is on disk: a job that stands still goes on from there."""
    step = job.get("checkpoint_step")
    if step is not None:
        return f"of step {step}"
    at_rest = job["state"] in ("paused", "failed", "cancelled") and job["step"] >= 0
    return "none: resumed, it would begin again" if at_rest else ""


class EventLines:
    """Events in lines, oldest first, under a heading with the day and the zone wherever those
    change, as the first time."""

    def __init__(self) -> None:
        self._heading = ""

    def of(self, event: Mapping[str, Any]) -> str:
        """The event's line, behind a heading where it needs one."""
        at = float(event["time"])
        kind, message = plain(str(event["kind"])), plain(str(event["message"]))
        line = f"{clock(at, date=False)}  {kind:<18} {message}"
        heading, before = f"{day(at)}, {zone(at)}", self._heading
        self._heading = heading
        return line if heading == before else f"{heading}\n{line}"


def progress(job: Mapping[str, Any]) -> str:
    """``120/240``: steps done of all."""
    return f"{job['step'] + 1}/{job['steps']}"


def age(seconds: float) -> str:
    """``42s``, ``3m``, ``2h``, ``5d``."""
    whole = max(0, int(seconds))
    for size, unit in ((86400, "d"), (3600, "h"), (60, "m")):
        if whole >= size:
            return f"{whole // size}{unit}"
    return f"{whole}s"
