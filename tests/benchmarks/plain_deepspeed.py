"""The same model, data and DeepSpeed engine as a job, as a plain script.

What Octavo's cost is measured against:

    torchrun --nproc-per-node 4 tests/benchmarks/plain_deepspeed.py job.yaml --out steps.json

It trains the job's steps with the same FP8 layers and gradient exchange and nothing
around them: no controller, no telemetry, no snapshots, no detection. Rank 0 writes a row
a step as JSON: seconds since the epoch at its end, loss, gradient norm.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Iterator
from pathlib import Path

os.environ.setdefault("DS_ACCELERATOR", "cpu")
os.environ.setdefault("LOCAL_SIZE", os.environ.get("LOCAL_WORLD_SIZE", "1"))

import torch
import torch.distributed as dist

from launch.data import TokenStream, batch_of
from launch.engine import engine_of
from launch.schedule import lr_at
from orchestrator.spec.job import JobSpec, load_spec
from parallel.engine import Engine, StepResult


def training_steps(
    job: JobSpec, engine: Engine, first: int = 0, last: int | None = None
) -> Iterator[tuple[int, StepResult]]:
    """Train steps ``first`` up to, not including, ``last``; number and result of each."""
    training = job.training
    stream = TokenStream(job.data, training.seq_len)
    assert job.parallelism.data is not None
    assert training.train_micro_batch_size_per_gpu is not None
    assert training.gradient_accumulation_steps is not None
    for step in range(first, training.steps if last is None else last):
        batches = stream.micro_batches(
            batch_of(step, frozenset()),
            engine.coordinate.data,
            job.parallelism.data,
            training.train_micro_batch_size_per_gpu,
            training.gradient_accumulation_steps,
        )
        yield step, engine.train_step(batches, lr_at(step, training, 1.0))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("spec", type=Path)
    parser.add_argument("--steps", type=int, default=None)
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")

    job = load_spec(arguments.spec)
    engine = engine_of(job)
    rows = []
    for _, result in training_steps(job, engine, last=arguments.steps):
        # The loss is read every step, as a training script prints it.
        rows.append((time.time(), float(result.loss), result.grad_norm))
    if dist.get_rank() == 0:
        arguments.out.write_text(json.dumps(rows))


if __name__ == "__main__":
    main()
