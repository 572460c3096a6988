"""What a checkpoint on its way to disk costs the steps beside it, beyond the snapshot that it is.

    python -m tests.benchmarks.bench_checkpoints [--rounds 5] [--steps 240] [--layouts 2x2 1x1]

The demo without its drill under Octavo, with a snapshot each ten steps, and each of them also a
checkpoint, or none; the two take turns on one cluster. A run's time a step is the median of means
over ten successive steps, each of which has one checkpoint in it: hashed, written, read back and
committed. Both must show the same losses to the bit. Printed too: how many were written, and how
many left out because the disk was behind.
"""

from __future__ import annotations

from orchestrator.api.client import Client
from orchestrator.spec.job import JobSpec
from tests.benchmarks.bench_overhead import compare_layouts
from tests.benchmarks.bench_snapshots import EVERY, compare_with_and_without
from tests.benchmarks.sides import Run


def main() -> None:
    """Print a line a round, then the median ratio."""
    compare_layouts(_compare, rounds=5)


def _compare(layout: str, rounds: int, steps: int) -> None:
    def every(spec: JobSpec, on: bool) -> JobSpec:
        checkpoint = spec.checkpoint.model_copy(update={"every": EVERY if on else 0})
        return spec.model_copy(update={"checkpoint": checkpoint})

    def written(client: Client, run: Run) -> str:
        kinds = [event["kind"] for event in client.events(run.job)["events"]]
        counts = kinds.count("checkpoint_written"), kinds.count("copy_failed")
        return " ({} written, {} left out)".format(*counts)

    compare_with_and_without("checkpoints", every, layout, rounds, steps, written)


if __name__ == "__main__":
    main()
