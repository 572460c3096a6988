"""What a checkpoint on its way to disk costs the steps beside it, beyond the snapshot that it is.

    python -m tests.benchmarks.bench_checkpoints [--rounds 5] [--steps 240] [--layouts 2x2 1x1]
        [--out DIR]

The demo without its drill under Octavo, with a snapshot each ten steps, and each of them also a
checkpoint, or none; the two take turns on one cluster. A run's time a step is the median of means
over ten successive steps, each of which has one checkpoint in it: hashed, written, read back and
committed. Both must show the same losses to the bit. Counted too: how many were written, and how
many left out because the disk was behind.
"""

from __future__ import annotations

from collections.abc import Mapping

from orchestrator.api.client import Client
from orchestrator.spec.job import JobSpec
from tests.benchmarks.bench_overhead import compare_layouts
from tests.benchmarks.bench_snapshots import EVERY, compare_with_and_without
from tests.benchmarks.results import Result
from tests.benchmarks.sides import Run


def main() -> None:
    """Print a line a run, then the table."""
    compare_layouts("bench_checkpoints", _compare, rounds=5)


def _compare(layout: str, rounds: int, steps: int) -> list[Result]:
    def every(spec: JobSpec, on: bool) -> JobSpec:
        checkpoint = spec.checkpoint.model_copy(update={"every": EVERY if on else 0})
        return spec.model_copy(update={"checkpoint": checkpoint})

    def written(client: Client, run: Run) -> Mapping[str, float]:
        kinds = [event["kind"] for event in client.events(run.job)["events"]]
        return {
            "checkpoints written": kinds.count("checkpoint_written"),
            "checkpoints left out, the disk being behind": kinds.count("copy_failed"),
        }

    return compare_with_and_without("checkpoints", every, layout, rounds, steps, count=written)


if __name__ == "__main__":
    main()
