"""The demo's model, batches and schedule without its drill, for benchmarks that compare losses.

``demo_run`` is the demo's spec with other numerics on other ranks; ``losses`` a rank's body that
trains it. Promises: runs of one seed start from the same weights and see the same batches, so
that numerics alone differ, and a run's losses are the same each time. ``Rows`` keeps what has
ended in a file, so that hours of runs may be begun, ended and gone on with.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from orchestrator.spec.job import JobSpec, load_spec

if TYPE_CHECKING:
    from torch import nn

    from launch.config import DataConfig
    from launch.data import TokenStream
    from parallel.engine import MicroBatch

DEMO = Path(__file__).parents[2] / "deploy/jobs/demo.yaml"
MICRO_BATCH = 16
"""Sequences at once: as many as keep one core busy, which changes no sum but its order."""


@lru_cache(maxsize=1)
def demo_spec() -> JobSpec:
    """The demo's, read once: its check looks at every file of the text."""
    return load_spec(DEMO)


def demo_run(
    seed: int,
    steps: int,
    *,
    replicas: int = 1,
    micro_batch: int = MICRO_BATCH,
    **sections: object,
) -> JobSpec:
    """The demo on ``replicas`` data-parallel ranks and nothing else, ``sections`` replaced.

    Another ``micro_batch`` (sequences) changes nothing but the order of sums.
    """
    demo = demo_spec()
    training = demo.training
    assert training.train_batch_size is not None
    count, rest = divmod(training.train_batch_size, micro_batch * replicas)
    if rest:
        raise ValueError(f"{replicas} replicas don't share {training.train_batch_size} sequences")
    numbers = {
        "steps": steps,
        "seed": seed,
        "train_micro_batch_size_per_gpu": micro_batch,
        "gradient_accumulation_steps": count,
    }
    parallelism = demo.parallelism.model_copy(update={"pipeline": 1, "data": replicas})
    return demo.model_copy(
        update={
            "parallelism": parallelism,
            "training": training.model_copy(update=numbers),
            "drills": (),
            **sections,
        }
    )


def losses(
    rank: int,
    world_size: int,
    run: JobSpec,
    prepare: Callable[[nn.Module], None] | None = None,
) -> list[float]:
    """The loss of each step, the mean over the replicas; for ``run_ranks``.

    ``prepare`` may change what the engine's module computes, before the first step.
    """
    from launch.engine import engine_of
    from launch.schedule import lr_at

    engine = engine_of(run)
    if prepare is not None:
        prepare(engine._engine.module)
    of_step = batches_of(run, engine.coordinate.data, world_size)
    return [
        float(engine.train_step(of_step(step), lr_at(step, run.training, 1.0)).loss)
        for step in range(run.training.steps)
    ]


def batches_of(run: JobSpec, replica: int, replicas: int) -> Callable[[int], Iterator[MicroBatch]]:
    """What gives ``replica`` its micro-batches of a step."""
    from launch.data import batch_of

    training = run.training
    micro, count = training.train_micro_batch_size_per_gpu, training.gradient_accumulation_steps
    assert micro is not None and count is not None
    stream = _stream(run.data, training.seq_len)

    def of_step(step: int) -> Iterator[MicroBatch]:
        batch = batch_of(step, frozenset())
        return stream.micro_batches(batch, replica, replicas, micro, count)

    return of_step


@lru_cache(maxsize=1)
def _stream(data: DataConfig, seq_len: int) -> TokenStream:
    """One for all runs of a process: reading a text takes seconds."""
    from launch.data import TokenStream

    return TokenStream(data, seq_len)


class Rows:
    """What finished runs came to, by name; in a file where one is given."""

    def __init__(self, file: Path | None) -> None:
        """Raises ValueError for a file that holds anything else."""
        self._file = file
        self._rows: dict[str, Any] = {}
        if file and file.exists():
            self._rows = json.loads(file.read_text())
            if not isinstance(self._rows, dict):
                raise ValueError(f"{file} holds no rows: give another file, or remove it")

    def __contains__(self, name: str) -> bool:
        return name in self._rows

    def __getitem__(self, name: str) -> Any:
        return self._rows[name]

    def add(self, name: str, told: Any) -> None:
        """Keep it, in the file too before this returns."""
        self._rows[name] = told
        if self._file:
            # By a rename: whoever ends the benchmark meanwhile loses no row.
            written = self._file.with_suffix(".part")
            written.write_text(json.dumps(self._rows, indent=1))
            written.replace(self._file)
