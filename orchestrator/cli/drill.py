"""``octavo drill``: recovery rehearsed on short copies of a job, and a table of what was caught.

Promises: everything runs on a Ray and in a folder of the command's own, both gone when it
returns, also on Ctrl-C; the job's own storage, W&B run and webhook are not touched. One drill
a run (``orchestrator.replay.rehearsal`` says why).
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, TextIO

from orchestrator.api.client import Client
from orchestrator.cli.interrupts import Interrupted, interruptible, uninterruptible
from orchestrator.cli.show import USAGE, CommandError, Output, print_json
from orchestrator.cluster.local import LocalError, Starting
from orchestrator.home.folder import Home
from orchestrator.placement.placement import need_of
from orchestrator.replay.job_trace import trace_of_client
from orchestrator.replay.rehearsal import (
    KINDS,
    LeftOut,
    Outcome,
    Rehearsal,
    final_loss,
    least_steps,
    outcome,
    plan,
)
from orchestrator.spec.errors import nearest
from orchestrator.spec.job import JobSpec, load_spec, spec_data

POLL_S = 0.5
UNCAUGHT = 1


def rehearse(file: Path, kinds: Sequence[str], steps: int | None, output: Output) -> int:
    """Rehearse the job of ``file``; the exit code, 1 when a drill was not caught."""
    spec = load_spec(file)
    jobs, left_out = planned(spec, kinds, steps)
    told = sys.stderr if output is Output.json else sys.stdout
    for kind in left_out:
        print(f"without {kind.kind}: {kind.why}", file=told)
    try:
        with interruptible():
            found = _run(jobs, str(file), told)
    except Interrupted as ended:
        raise CommandError(f"{ended.word}: the rehearsal is not over", code=ended.code) from None
    except LocalError as error:
        raise CommandError(str(error)) from None
    if output is Output.json:
        print_json(
            {
                "drills": [result.to_json() for result in found],
                "left_out": {kind.kind: kind.why for kind in left_out},
            }
        )
    else:
        for line in table(found):
            print(line)
    return 0 if all(result.caught for result in found) else UNCAUGHT


def planned(
    spec: JobSpec, kinds: Sequence[str], steps: int | None
) -> tuple[list[Rehearsal], list[LeftOut]]:
    """The jobs to run. Raises ``CommandError`` for what can't be rehearsed as it was asked."""
    for kind in kinds:
        if kind not in KINDS:
            remedy = nearest(kind, KINDS) or f"one of {', '.join(KINDS)}"
            raise CommandError(f"--kinds: {kind!r} is not a kind of drill", remedy, USAGE)
    least = least_steps(spec)
    if steps is not None and steps < least:
        message = (
            f"--steps: {steps} are too few: detection.window = {spec.detection.window} steps come "
            "before the drill, and what it does and what is done about it after"
        )
        raise CommandError(message, f"make it at least {least}", USAGE)
    jobs, left_out = plan(spec, kinds or KINDS, steps or least)
    if kinds and left_out:
        first = left_out[0]
        raise CommandError(f"--kinds: {first.kind}: {first.why}", "leave it out", USAGE)
    return jobs, left_out


def _run(jobs: Sequence[Rehearsal], file: str, told: TextIO) -> list[Outcome]:
    """All jobs, one after the other, on one local Ray."""
    with tempfile.TemporaryDirectory(prefix="octavo-drill-") as folder:
        home = Home(Path(folder) / "home")
        print(f"{len(jobs)} runs: starting a local Ray", file=told, flush=True)
        host = Starting(home, need_of(jobs[0].spec).slots, tied=True)
        try:
            host.wait()
            client = Client.of_home(home)
            found: list[Outcome] = []
            undisturbed: float | None = None
            for job in jobs:
                shown = _train(client, host, job.spec, file)
                trace = trace_of_client(client, shown["id"])
                if not job.kind:
                    undisturbed = _undisturbed(trace, shown, told)
                    continue
                stored = (trace.steps, trace.incidents, trace.actions)
                found.append(outcome(job, *stored, shown["state"], undisturbed))
                print(_sentence(found[-1]), file=told, flush=True)
            return found
        finally:
            with uninterruptible():
                host.end()


def _train(client: Client, host: Starting, spec: JobSpec, file: str) -> dict[str, Any]:
    """Run one job until it is settled; as last seen."""
    shown = client.submit(spec_data(spec), file)
    while not shown["settled"]:
        time.sleep(POLL_S)
        if not host.alive():
            raise LocalError("the local Ray has ended")
        shown = client.job(shown["id"])
    return shown


def _undisturbed(trace: Any, shown: dict[str, Any], told: TextIO) -> float | None:
    """Final loss of the run without a drill. What is wrong with it is wrong with the job."""
    if shown["state"] != "succeeded":
        message = f"the run without a drill {shown['state']}: {shown['reason']}"
        raise CommandError(message, "`octavo run` shows why")
    for action in trace.actions:
        print(f"undisturbed, and yet {action.kind}: {action.reason}", file=told)
    loss = final_loss(list(trace.steps))
    print(f"undisturbed: ends at a loss of {_number(loss)}", file=told, flush=True)
    return loss


def _sentence(found: Outcome) -> str:
    if not found.caught:
        return f"{found.kind} before step {found.step}: NOT CAUGHT"
    assert found.seen is not None
    after = found.seen.step - found.step
    return f"{found.kind} before step {found.step}: {found.seen.kind} after {max(0, after)} steps"


def table(found: Sequence[Outcome]) -> Iterator[str]:
    """A line a drill, under a heading."""
    rows = [("DRILL", "STEP", "SEEN AFTER", "BY", "SUSPECTS", "ANSWER", "LOST", "LOSS", "HEALTHY")]
    for result in found:
        seen = result.seen
        rows.append(
            (
                result.kind,
                str(result.step),
                "–" if seen is None else str(max(0, seen.step - result.step)),
                "NOT CAUGHT" if seen is None else seen.detector,
                "–" if seen is None else _suspects(seen),
                ", ".join(action.kind for action in result.answers) or "–",
                str(result.lost),
                _number(result.final_loss),
                _number(result.undisturbed),
            )
        )
    sizes = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        yield " ".join(cell.ljust(size) for cell, size in zip(row, sizes, strict=True)).rstrip()
    missed = [result.kind for result in found if not result.caught]
    yield f"not caught: {', '.join(missed)}" if missed else f"all {len(found)} were caught"


def _suspects(seen: Any) -> str:
    named = [suspect.layer for suspect in seen.suspects] or [f"rank {r}" for r in seen.ranks]
    return ", ".join(named[:2]) or "–"


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:.4f}"
