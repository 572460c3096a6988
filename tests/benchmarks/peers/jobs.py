"""The job that every side of the rank-killed row trains, and when the rank is killed in it.

The demo's model, data, seed and numbers on two data-parallel ranks: torchft replicates whole
models and drives no DeepSpeed pipeline, so all sides get the layout that it can have.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from pathlib import Path

from orchestrator.spec.job import JobSpec
from tests.benchmarks.bench_overhead import on_layout
from tests.benchmarks.peers import recorded

LAYOUT = "1x2"
SAVE_EVERY = 10
"""Steps from one state to the next that a side may go back to, on every side."""
EARLIEST, LATEST = 0.5, 0.75
"""Parts of the run between which the fault falls: late enough for whatever a side prepares beside
its first steps."""


@dataclass(frozen=True, slots=True)
class PlannedFault:
    """A rank's SIGKILL, for every side alike."""

    rank: int
    after_step: int
    """The rank has recorded the end of this one."""
    delay: float
    """Usual steps from there to the signal, in [0, 1)."""


def recorded_job(steps: int) -> JobSpec:
    """The job, its steps recorded where ``RECORD_STEPS`` is set."""
    demo = on_layout(LAYOUT, steps)
    shape = demo.model.model_dump(exclude={"factory", "options"}, exclude_none=True)
    model = type(demo.model)(
        factory=recorded.FACTORY, num_layers=demo.model.num_layers, options=shape
    )
    return demo.model_copy(update={"model": model})


def recorded_into(job: JobSpec, folder: Path) -> JobSpec:
    """``job`` with the folder in its ranks' environment."""
    return job.model_copy(update={"envs": {**job.envs, recorded.FOLDER: str(folder)}})


def planned_fault(seed: int, turn: int, *, steps: int, world: int) -> PlannedFault:
    """The fault of run ``turn``: a function of its arguments alone."""
    draw = random.Random(f"rank killed {seed} {turn}")
    return PlannedFault(
        rank=draw.randrange(world),
        after_step=int(steps * draw.uniform(EARLIEST, LATEST)),
        delay=draw.random(),
    )
