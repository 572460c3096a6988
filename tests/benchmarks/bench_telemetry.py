"""What watching costs a step of the demo's model, and how much is written of it.

    python -m tests.benchmarks.bench_telemetry [--rounds 5] [--steps 240] [--layouts 2x2 1x1]
        [--out DIR]

The demo without its drill under Octavo, with all telemetry (statistics of every tensor in every
step, a W&B run offline, detectors that look at all of it) and with none (no statistics after the
first step, no W&B); the two take turns on one cluster. What is left in both is the report of each
step, without which nobody would know that the job trains. The aim is 1.01 at most. Both must show
the same losses to the bit.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from orchestrator.api.client import Client
from orchestrator.spec.job import JobSpec
from tests.benchmarks.bench_overhead import compare_layouts
from tests.benchmarks.bench_snapshots import NEVER, compare_with_and_without
from tests.benchmarks.results import Result, at_most
from tests.benchmarks.sides import Run

AIM = at_most(1.01)


def main() -> None:
    """Print a line a run, then the table."""
    compare_layouts("bench_telemetry", _compare, rounds=5)


def _compare(layout: str, rounds: int, steps: int) -> list[Result]:
    return compare_with_and_without("telemetry", _watched, layout, rounds, steps, AIM, _volume)


def _watched(spec: JobSpec, on: bool) -> JobSpec:
    fp8 = spec.fp8.model_copy(update={"statistics_every": 1 if on else NEVER})
    wandb = spec.wandb.model_copy(update={"mode": "offline" if on else "disabled"})
    return spec.model_copy(update={"fp8": fp8, "wandb": wandb})


def _volume(client: Client, run: Run) -> Mapping[str, float]:
    """Bytes a step in the folder of the W&B run."""
    folder = Path(client.job(run.job)["job_dir"]) / "wandb"
    size = sum(file.stat().st_size for file in folder.rglob("*.wandb"))
    return {"bytes a step for W&B": size / len(run.losses)}


if __name__ == "__main__":
    main()
