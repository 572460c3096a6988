"""What a checkpoint on its way to disk costs the steps beside it, beyond the snapshot that it is.

    python -m tests.benchmarks.bench_checkpoints [--rounds 5] [--steps 240] [--layouts 2x2 1x1]

The demo without its drill under Octavo, with a snapshot each ten steps, and each of them also a
checkpoint, or none; the two take turns on one cluster. A run's time a step is the median of means
over ten successive steps, each of which has one checkpoint in it: hashed, written, read back and
committed. Both must show the same losses to the bit. Printed too: how many were written, and how
many left out because the disk was behind.
"""

from __future__ import annotations

import statistics
import tempfile
from pathlib import Path

from tests.benchmarks.bench_overhead import compare_layouts, on_layout
from tests.benchmarks.bench_snapshots import EVERY, step_s
from tests.benchmarks.sides import cluster, under_octavo


def main() -> None:
    """Print a line a round, then the median ratio."""
    compare_layouts(_compare, rounds=5)


def _compare(layout: str, rounds: int, steps: int) -> None:
    spec = on_layout(layout, steps)
    assert spec.slots_per_node is not None
    ratios = []
    with (
        tempfile.TemporaryDirectory() as folder,
        cluster(Path(folder) / "home", slots=spec.slots_per_node) as client,
    ):
        for turn in range(rounds):
            runs = {}
            # Whoever is second finds warmer caches: they take turns at that too.
            for every in (EVERY, 0) if turn % 2 else (0, EVERY):
                checkpoint = spec.checkpoint.model_copy(update={"every": every})
                changed = spec.model_copy(update={"checkpoint": checkpoint})
                runs[every] = under_octavo(client, changed)
            with_them, without = step_s(runs[EVERY]), step_s(runs[0])
            ratios.append(with_them / without)
            same = "equal to the bit" if runs[EVERY].losses == runs[0].losses else "DIFFERENT"
            newest = client.jobs()[-1 if turn % 2 == 0 else -2]["id"]
            kinds = [event["kind"] for event in client.events(newest)["events"]]
            written, left_out = kinds.count("checkpoint_written"), kinds.count("copy_failed")
            print(
                f"{layout}: {1000 * with_them:.1f} ms a step with checkpoints ({written} written, "
                f"{left_out} left out), {1000 * without:.1f} ms without: {ratios[-1]:.3f}; losses "
                f"{same}",
                flush=True,
            )
    print(f"{layout}: step, with / without: median {statistics.median(ratios):.3f} of {rounds}")


if __name__ == "__main__":
    main()
