"""What snapshots in memory cost a step of the demo's model.

    python -m tests.benchmarks.bench_snapshots [--rounds 5] [--steps 240] [--layouts 2x2 1x1]
        [--out DIR]

The demo without its drill under Octavo, with a snapshot each ten steps as by default and with none
after the first; the two take turns on one cluster. A run's time a step is the median of means over
ten successive steps, each of which has one snapshot in it: its copy, and what shipping takes from
the ranks. Both must show the same losses to the bit.
"""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from orchestrator.api.client import Client
from orchestrator.spec.job import JobSpec
from tests.benchmarks.bench_overhead import compare_layouts, on_layout
from tests.benchmarks.peers.turns import Failed, failures, hangs, take_turns, values, why
from tests.benchmarks.results import Aim, Result, at_most, measured
from tests.benchmarks.sides import Run, cluster, under_octavo

EVERY = 10
NEVER = 1_000_000
AIM = at_most(1.02)
WITHOUT, WITH = "without", "with"


@dataclass(frozen=True, slots=True)
class Compared:
    """One run of a pair."""

    run: Run
    told: Mapping[str, float] = field(default_factory=dict)
    """What else is counted of the run with it, by name."""


def main() -> None:
    """Print a line a run, then the table."""
    compare_layouts("bench_snapshots", _compare, rounds=5)


def _compare(layout: str, rounds: int, steps: int) -> list[Result]:
    def every(spec: JobSpec, on: bool) -> JobSpec:
        snapshots = spec.snapshots.model_copy(update={"every": EVERY if on else NEVER})
        return spec.model_copy(update={"snapshots": snapshots})

    return compare_with_and_without("snapshots", every, layout, rounds, steps, AIM)


def compare_with_and_without(
    what: str,
    change: Callable[[JobSpec, bool], JobSpec],
    layout: str,
    rounds: int,
    steps: int,
    aim: Aim | None = None,
    count: Callable[[Client, Run], Mapping[str, float]] = lambda client, run: {},
) -> list[Result]:
    """The rows of the demo with and without ``what``, by turns.

    ``change``: the spec with it (True) or without; ``aim``: of the ratio of their steps; ``count``:
    other numbers of the run with it, by name.
    """
    spec = on_layout(layout, steps)
    assert spec.slots_per_node is not None

    def run(on: bool) -> Compared:
        found = under_octavo(client, change(spec, on))
        return Compared(found, count(client, found) if on else {})

    def tell(turn: int, side: str, found: Compared | Failed) -> None:
        said = found.why if isinstance(found, Failed) else f"{1000 * step_s(found.run):.1f} ms"
        print(f"{layout}, round {turn}, {side} {what}: {said}", flush=True)

    with (
        tempfile.TemporaryDirectory() as folder,
        cluster(Path(folder) / "home", slots=spec.slots_per_node) as client,
    ):
        # Whoever is second finds warmer caches: they take turns at that too.
        sides = {WITHOUT: partial(run, False), WITH: partial(run, True)}
        told = take_turns(sides, rounds, tell)
    return rows_of(what, f"demo model, {layout}", told, aim)


def rows_of(
    what: str, setting: str, told: Mapping[str, Sequence[Compared | Failed]], aim: Aim | None
) -> list[Result]:
    """Times of both, their ratio in rounds that have both, and whether losses differ."""
    rows = []
    counts: dict[str, Any]
    for side, found in told.items():
        steps = [step_s(one.run) for one in values(found)]
        counts = {"failures": failures(found), "hangs": hangs(found)}
        name = f"a step {side} {what}"
        rows.append(measured(name, setting, steps, "s", note=why(found), **counts))
    pairs = [
        (on.run, off.run)
        for on, off in zip(told[WITH], told[WITHOUT], strict=True)
        if isinstance(on, Compared) and isinstance(off, Compared)
    ]
    both = [found for side in told.values() for found in side]
    counts = {"failures": failures(both), "hangs": hangs(both)}
    ratios = [step_s(on) / step_s(off) for on, off in pairs]
    name = f"a step with {what} over one without"
    rows.append(measured(name, setting, ratios, "×", aim=aim, **counts))
    differing = [
        sum(a != b for a, b in zip(on.losses, off.losses, strict=True)) for on, off in pairs
    ]
    name = f"steps whose loss {what} change"
    rows.append(measured(name, setting, differing, "", aim=at_most(0), **counts))
    runs = values(told[WITH])
    for other in runs[0].told if runs else ():
        rows.append(measured(other, setting, [run.told[other] for run in runs], ""))
    return rows


def step_s(run: Run) -> float:
    """Seconds a step, snapshots included."""
    whole = range(0, len(run.gaps) - EVERY + 1, EVERY)
    return statistics.median(statistics.fmean(run.gaps[at : at + EVERY]) for at in whole)


if __name__ == "__main__":
    main()
