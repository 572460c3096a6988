"""Final losses of every FP8 recipe and of torchao's emulations, against BF16: several seeds.

    python -m tests.benchmarks.bench_parity [--steps 500] [--seeds 0 1 2] [--processes 2]
        [--numerics bf16 delayed …] [--emulation-seeds 1] [--kept FILE] [--out DIR]

Each run is the demo's model, batches and schedule on one rank, without its drill, so that
only the linears' numerics differ; runs of a seed start from the same weights and see the
same batches. The final loss is the mean of the last fifty steps: single steps differ more
by their text than recipes do. ``bf16, other sums`` is BF16 with micro-batches of half the
size: how far it ends from BF16 is chance, and a recipe whose gap is no larger can't be told from
BF16. Emulations take several times as long and are there for what they
cost and that they come out near: they run with the first of the seeds alone unless
``--emulation-seeds`` says otherwise. ``--kept``: losses are kept in that file, and runs in it are
not done again; one that fails or hangs isn't kept.
"""

from __future__ import annotations

import argparse
import math
import statistics
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

from tests.benchmarks.demo_runs import Rows, losses
from tests.benchmarks.numerics import (
    ALL,
    BF16,
    EMULATION,
    TORCHAO_RECIPES,
    available,
    run_of,
    side_of,
    take_over,
)
from tests.benchmarks.results import Aim, Result, add_arguments, measured, report
from tests.ranks.launch_ranks import RankFailed, run_ranks

LAST = 50
"""Steps at the end whose losses are averaged."""
LONGEST_S = 4 * 3600.0
"""Of one run."""
AIMS = {
    "delayed": Aim(1.0, of="mean"),
    **dict.fromkeys(("current", "block", "mxfp8"), Aim(0.5, of="mean")),
}
"""Percent above BF16's. Of the mean: runs differ by chance, which three seeds' median keeps one
of."""

Case = tuple[str, int, int]
"""Numerics, seed, steps."""


def main() -> None:
    """Print a line a run as it ends, then the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--numerics", nargs="+", default=list(ALL), choices=ALL)
    parser.add_argument("--emulation-seeds", type=int, default=1, help="how many of the seeds")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--kept", type=Path, help="JSON file of finished runs, read and written")
    add_arguments(parser)
    arguments = parser.parse_args()
    began = time.monotonic()
    kept = Rows(arguments.kept)
    names, missing = available((BF16, *arguments.numerics))
    of = {name: seeds_of(name, arguments.seeds, arguments.emulation_seeds) for name in names}
    cases = [
        (name, seed, arguments.steps)
        for seed in arguments.seeds
        for name in names
        if seed in of[name]
    ]
    wanted = [case for case in cases if key(*case) not in kept]
    failed: dict[Case, str] = {}
    # A thread a run: its rank is a process of its own.
    with ThreadPoolExecutor(arguments.processes) as pool:
        for case, told in zip(wanted, pool.map(_final, wanted), strict=True):
            if isinstance(told, str):
                failed[case] = told
            else:
                kept.add(key(*case), told)
            print(f"{key(*case)}: {told}", flush=True)
    finals = {case: kept[key(*case)] for case in cases if key(*case) in kept}
    rows = [
        row for name in names for row in rows_of(name, of[name], arguments.steps, finals, failed)
    ]
    seconds = time.monotonic() - began
    report("bench_parity", rows, arguments.out, seconds=seconds, left_out=missing)


def seeds_of(name: str, seeds: Sequence[int], emulation_seeds: int) -> Sequence[int]:
    """Those that a numerics runs with."""
    return seeds[:emulation_seeds] if name in (EMULATION, *TORCHAO_RECIPES) else seeds


def key(numerics: str, seed: int, steps: int) -> str:
    """A run's name in the file."""
    return f"{numerics}/{seed}/{steps}"


def _final(case: Case) -> float | str:
    """The final loss, or why there is none."""
    numerics, seed, steps = case
    body = partial(losses, prepare=partial(take_over, numerics=numerics))
    try:
        told = run_ranks(body, 1, run_of(numerics, seed, steps), timeout_s=LONGEST_S)
    except RankFailed as error:
        return str(error)
    final = statistics.fmean(told[0][-LAST:])
    return final if math.isfinite(final) else f"ended with a loss of {final}"


def rows_of(
    name: str,
    seeds: Sequence[int],
    steps: int,
    finals: Mapping[Case, float],
    failed: Mapping[Case, str],
) -> list[Result]:
    """The final loss of one numerics over the seeds, and how far it is above BF16's."""
    cases = [(name, seed, steps) for seed in seeds]
    hangs = sum("silent for" in failed.get(case, "") for case in cases)
    failures = sum(case in failed for case in cases) - hangs
    setting = f"demo model, {steps} steps, mean of the last {min(LAST, steps)}"
    side, note = side_of(name), "" if name in side_of(name) else name
    found = [finals[case] for case in cases if case in finals]
    row = partial(measured, setting=setting, side=side, failures=failures, hangs=hangs, note=note)
    rows = [row("final loss", values=found, unit="nats")]
    gaps = [
        100 * (finals[case] / finals[BF16, *case[1:]] - 1)
        for case in cases
        if case in finals and (BF16, *case[1:]) in finals
    ]
    if name == BF16:
        return rows
    aim: Aim | None = AIMS.get(name)
    if gaps:
        mean = f"mean {statistics.fmean(gaps):+.2f} %"
        told = "; ".join(filter(None, (note, mean)))
        rows.append(row("final loss, above BF16", values=gaps, unit="%", aim=aim, note=told))
    else:
        rows.append(row("final loss, above BF16", values=[], unit="%", aim=aim))
    return rows


if __name__ == "__main__":
    main()
