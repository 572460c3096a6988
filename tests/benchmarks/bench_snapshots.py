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
from collections.abc import Callable
from pathlib import Path

from orchestrator.api.client import Client
from orchestrator.spec.job import JobSpec
from tests.benchmarks.bench_overhead import compare_layouts, on_layout
from tests.benchmarks.sides import Run, cluster, under_octavo

EVERY = 10
NEVER = 1_000_000


def main() -> None:
    """Print a line a round, then the median ratio."""
    compare_layouts(_compare, rounds=5)


def _compare(layout: str, rounds: int, steps: int) -> None:
    def every(spec: JobSpec, on: bool) -> JobSpec:
        snapshots = spec.snapshots.model_copy(update={"every": EVERY if on else NEVER})
        return spec.model_copy(update={"snapshots": snapshots})

    compare_with_and_without("snapshots", every, layout, rounds, steps)


def compare_with_and_without(
    what: str,
    change: Callable[[JobSpec, bool], JobSpec],
    layout: str,
    rounds: int,
    steps: int,
    tell: Callable[[Client, Run], str] = lambda client, run: "",
) -> None:
    """The demo with and without ``what``, by turns; prints times, ratio, and what ``tell`` says.

    ``change``: the spec with it (True) or without; ``tell``: of the run with it.
    """
    spec = on_layout(layout, steps)
    assert spec.slots_per_node is not None
    ratios = []
    with (
        tempfile.TemporaryDirectory() as folder,
        cluster(Path(folder) / "home", slots=spec.slots_per_node) as client,
    ):
        for turn in range(rounds):
            # Whoever is second finds warmer caches: they take turns at that too.
            sides = (True, False) if turn % 2 else (False, True)
            runs = {on: under_octavo(client, change(spec, on)) for on in sides}
            with_it, without = step_s(runs[True]), step_s(runs[False])
            ratios.append(with_it / without)
            same = "equal to the bit" if runs[True].losses == runs[False].losses else "DIFFERENT"
            print(
                f"{layout}: {1000 * with_it:.1f} ms a step with {what}{tell(client, runs[True])}, "
                f"{1000 * without:.1f} ms without: {ratios[-1]:.3f}; losses {same}",
                flush=True,
            )
    print(f"{layout}: step, with / without: median {statistics.median(ratios):.3f} of {rounds}")


def step_s(run: Run) -> float:
    """Seconds a step, snapshots included."""
    whole = range(0, len(run.gaps) - EVERY + 1, EVERY)
    return statistics.median(statistics.fmean(run.gaps[at : at + EVERY]) for at in whole)


if __name__ == "__main__":
    main()
