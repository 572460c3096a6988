"""One run of one side, a rank killed in it or not; its steps, and what they come to.

    run = run_side(side, job, folder, planned_fault(seed, turn, steps=240, world=2))

Promises: a run is over within a bound: one that makes no new step for ``STALL_S`` (``START_S``
before the first) is ended, and is a hang; whatever becomes of it is a ``SideRun``, no error, and
none of its processes is left.
"""

from __future__ import annotations

import itertools
import os
import signal
import statistics
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from orchestrator.spec.job import JobSpec
from tests.benchmarks.peers import recorded
from tests.benchmarks.peers.jobs import PlannedFault
from tests.benchmarks.peers.judging import Fault, HowEnded, Verdict, judge
from tests.benchmarks.peers.processes import SideError, end_all, new_mark
from tests.benchmarks.peers.recorded import StepEnd
from tests.benchmarks.peers.sides import Running, Side, steps_of

START_S = 240.0
STALL_S = 60.0
"""Several times what any side needs on a quiet machine to be back."""
LOOK_S = 0.02
"""How often the victim's file is looked at before the fault."""
WAIT_S = 0.5
"""How often the run is looked at otherwise."""


@dataclass(frozen=True, slots=True)
class SideRun:
    """What became of a run."""

    side: str
    ends: tuple[StepEnd, ...]
    fault: Fault | None
    verdict: Verdict
    note: str
    """Why, where it didn't finish: the end of what it printed, or the error."""


def run_side(side: Side, job: JobSpec, folder: Path, planned: PlannedFault | None) -> SideRun:
    """Run ``job`` under ``side`` in a new folder, with the fault if one is planned."""
    folder.mkdir(parents=True)
    mark = new_mark()
    fault: Fault | None = None
    how: HowEnded = "exited"
    note = ""
    try:
        with side.start(job, folder, mark) as running:
            watch = _Watch(running, steps_of(folder))
            if planned is not None:
                fault = watch.kill(planned)
            how = watch.to_end()
            note = "" if how == "finished" else running.told()
    except Exception as error:
        if isinstance(error, subprocess.TimeoutExpired):
            how = "stalled"
        note = f"{type(error).__name__}: {error}"
    finally:
        try:
            end_all(mark)
        except SideError as error:
            note = f"{note}\n{error}".strip()
    ends = tuple(recorded.read(steps_of(folder)))
    if planned is not None and fault is None and not note:
        note = "it was over before the fault"
    assert job.slots_per_node is not None
    verdict = judge(ends, fault, world=job.slots_per_node, steps=job.training.steps, how=how)
    return SideRun(side.name, ends, fault, verdict, note)


class _Watch:
    """Looks at a run's records until it is over."""

    def __init__(self, running: Running, steps: Path) -> None:
        self._running = running
        self._steps = steps
        self._newest = -1
        self._moved = time.monotonic()

    def kill(self, planned: PlannedFault) -> Fault | None:
        """Wait for the moment, send the signal; None if the run is over or stands still before."""
        file = self._steps / f"rank-{planned.rank}.jsonl"
        looked, size = 0.0, -1
        while True:
            now = file.stat().st_size if file.exists() else 0
            if now != size:
                size = now
                mine = [end for end in recorded.read(self._steps) if end.rank == planned.rank]
                if mine and mine[-1].step >= planned.after_step:
                    return _killed(mine, planned)
            if time.monotonic() - looked > WAIT_S:
                looked = time.monotonic()
                if self._running.poll() is not None or self._stalled():
                    return None
            time.sleep(LOOK_S)

    def to_end(self) -> HowEnded:
        """Wait for the end, or for too long without a new step."""
        while (code := self._running.poll()) is None:
            if self._stalled():
                return "stalled"
            time.sleep(WAIT_S)
        return "finished" if code == 0 else "exited"

    def _stalled(self) -> bool:
        newest = max((end.step for end in recorded.read(self._steps)), default=-1)
        if newest > self._newest:
            self._newest, self._moved = newest, time.monotonic()
        bound = START_S if newest < 0 else STALL_S
        return time.monotonic() - self._moved > bound


def _killed(mine: Sequence[StepEnd], planned: PlannedFault) -> Fault:
    gaps = [b.time - a.time for a, b in itertools.pairwise(mine)]
    due = mine[-1].time + planned.delay * (statistics.median(gaps) if gaps else 0.0)
    time.sleep(max(0.0, due - time.time()))
    now = time.time()
    os.kill(mine[-1].pid, signal.SIGKILL)
    return Fault(now, planned.rank, mine[-1].pid)
