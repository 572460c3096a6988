"""What snapshots in memory cost a step of the demo's model.

    python -m tests.benchmarks.bench_snapshots [--rounds 5] [--steps 240] [--layouts 2x2 1x1]

The demo without its drill under Octavo, with a snapshot each ten steps as by default and with none
after the first; the two take turns on one cluster. A run's time a step is the median of means over
ten successive steps, each of which has one snapshot in it: its copy, and what shipping takes from
the ranks. Both must show the same losses to the bit.
"""

from __future__ import annotations

import statistics
import tempfile
from pathlib import Path

from tests.benchmarks.bench_overhead import compare_layouts, on_layout
from tests.benchmarks.sides import Run, cluster, under_octavo

EVERY = 10
NEVER = 1_000_000


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
            for every in (EVERY, NEVER) if turn % 2 else (NEVER, EVERY):
                snapshots = spec.snapshots.model_copy(update={"every": every})
                runs[every] = under_octavo(client, spec.model_copy(update={"snapshots": snapshots}))
            with_them, without = step_s(runs[EVERY]), step_s(runs[NEVER])
            ratios.append(with_them / without)
            same = "equal to the bit" if runs[EVERY].losses == runs[NEVER].losses else "DIFFERENT"
            print(
                f"{layout}: {1000 * with_them:.1f} ms a step with snapshots, {1000 * without:.1f} "
                f"ms without: {ratios[-1]:.3f}; losses {same}",
                flush=True,
            )
    print(f"{layout}: step, with / without: median {statistics.median(ratios):.3f} of {rounds}")


def step_s(run: Run) -> float:
    """Seconds a step, snapshots included."""
    whole = range(0, len(run.gaps) - EVERY + 1, EVERY)
    return statistics.median(statistics.fmean(run.gaps[at : at + EVERY]) for at in whole)


if __name__ == "__main__":
    main()
