"""The control plane at scale, on one machine: how each cost grows with jobs, and with ranks.

    python -m tests.benchmarks.bench_control_plane [--jobs 10,100,1000,10000]
        [--running 1,10,100,1000] [--ranks 8,64,512,4096,16384] [--parts queue,…] [--out DIR]

Real: controller, store on disk, HTTP API on the loopback, the supervisor's loop, detectors, merging
of reports. Scripted: nodes, supervisors as the controller sees them, ranks. Each size has a store
and a process of its own. Printed are median and p99 a size, and the growth exponent: the slope of
the medians, least squares on logarithmic paper. Fails where one is above 1, that is, where
something grows faster than what it is made for; and where an aim in the table is missed.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from tests.benchmarks.results import Aim, Result, add_arguments, at_most, measured, report
from tests.benchmarks.results import shown as in_words

JOBS = (10, 100, 1_000, 10_000)
RUNNING = (1, 10, 100, 1_000)
RANKS = (8, 64, 512, 4_096, 16_384)
LINEAR = 1.0


@dataclass
class Growth:
    """One quantity at growing sizes. Seconds."""

    name: str
    of: str
    """What the size counts."""
    values: dict[int, list[float]] = field(default_factory=dict)
    aims: dict[int, Aim] = field(default_factory=dict)
    """Of the p99 at a size."""
    linear: bool = True
    """Whether it may grow with the size at all but no faster; the exponent is then an aim."""

    def rows(self) -> list[Result]:
        """A row a size, one of the p99 where it has an aim, one of the exponent."""
        found = []
        for size, seconds in sorted(self.values.items()):
            where = f"{size:,} {self.of}"
            worst = p99(seconds)
            told = f"p99 {in_words(worst, 's')}"
            found.append(measured(self.name, where, seconds, "s", note=told))
            if size in self.aims:
                found.append(
                    measured(f"{self.name}, p99", where, [worst], "s", aim=self.aims[size])
                )
        sizes = f"{min(self.values):,} to {max(self.values):,} {self.of}"
        if len(self.values) > 1:
            aim = at_most(LINEAR) if self.linear else None
            found.append(measured(f"{self.name}, exponent", sizes, [self.exponent()], "", aim=aim))
        return found

    def exponent(self) -> float:
        """Slope of the logarithm of the median over the logarithm of the size."""
        return slope({size: statistics.median(found) for size, found in self.values.items()})


def slope(values: dict[int, float]) -> float:
    """Least squares on log-log."""
    xs = [math.log(size) for size in values]
    ys = [math.log(max(value, 1e-9)) for value in values.values()]
    x, y = statistics.fmean(xs), statistics.fmean(ys)
    over = sum((a - x) * (b - y) for a, b in zip(xs, ys, strict=True))
    return over / sum((a - x) ** 2 for a in xs)


def p99(values: Sequence[float]) -> float:
    """The value that 99 of 100 are not above; the largest of fewer than 100."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, math.ceil(0.99 * len(ordered)) - 1)]


def took(work: Callable[[], object]) -> float:
    """Seconds of ``work``."""
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def in_a_process(part: str, *arguments: object) -> Any:
    """What ``PARTS[part]`` finds in a process and a folder of its own."""
    with tempfile.TemporaryDirectory(prefix="octavo-bench-control-") as folder:
        command = [sys.executable, "-m", "tests.benchmarks.control_plane_parts", part, folder]
        done = subprocess.run([*command, *map(str, arguments)], stdout=subprocess.PIPE, check=True)
    return json.loads(done.stdout.decode().splitlines()[-1])


def grown(sizes: Iterable[int], part: str, growths: Sequence[Growth], *arguments: object) -> None:
    """Run ``part`` at each size; its answer has a list of seconds by each growth's name."""
    for size in sizes:
        began = time.monotonic()
        found = in_a_process(part, size, *arguments)
        for growth in growths:
            if found.get(growth.name):
                growth.values[size] = found[growth.name]
        told = f"{part} {size:,}: {time.monotonic() - began:.0f} s"
        print(told, found.get("told", ""), file=sys.stderr, flush=True)


def queue_growths(largest: int) -> list[Growth]:
    """Of jobs that wait, most of them."""
    jobs = "jobs in the store"
    return [
        Growth("submit over HTTP", jobs, aims={largest: at_most(0.05)}),
        Growth("a page of the list", jobs),
        Growth("the newest page", jobs),
        Growth("all pages", jobs),
        Growth("status by id", jobs),
        Growth("status by name", jobs),
        Growth("status by a beginning", jobs),
        Growth("pass that changes nothing", jobs),
        Growth("pass after a submission", jobs),
        Growth("scrape of /metrics", jobs),
        Growth("controller restart, to the end of its first pass", jobs),
    ]


def main() -> int:
    """Run all parts, print the table; the number of aims that are missed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    sizes = lambda text: tuple(map(int, text.split(",")))  # noqa: E731
    parser.add_argument("--jobs", type=sizes, default=JOBS)
    parser.add_argument("--running", type=sizes, default=RUNNING)
    parser.add_argument("--ranks", type=sizes, default=RANKS)
    parser.add_argument("--parts", default="queue,running,telemetry,supervisor")
    add_arguments(parser)
    asked = parser.parse_args()
    began = time.monotonic()
    rows: list[Result] = []
    if "queue" in asked.parts:
        growths = queue_growths(max(asked.jobs))
        grown(asked.jobs, "queue", growths)
        rows += [row for growth in growths if growth.values for row in growth.rows()]
    if "running" in asked.parts:
        running = [
            Growth("batch of a step stored", "jobs that run"),
            Growth("a round: a step of every job", "jobs that run"),
            Growth("pass over running jobs", "jobs that run"),
        ]
        grown(asked.running, "running", running)
        rows += [row for growth in running if growth.values for row in growth.rows()]
    if "telemetry" in asked.parts:
        merging = [
            Growth("a step's reports, each rank on its own, at the supervisor", "ranks"),
            Growth("the same by a tree, at the supervisor", "ranks"),
            Growth("at the node that merges most", "ranks"),
        ]
        grown(asked.ranks, "telemetry", merging)
        rows += [row for growth in merging if growth.values for row in growth.rows()]
    if "supervisor" in asked.parts:
        setting = "10 steps/s, 1,002 tensors, 8 ranks"
        for name, part in (("", "supervisor"), (" with W&B offline", "with_wandb")):
            share = [100 * value for value in in_a_process(part, 1000)["share"]]
            told = f"supervisor{name}, of a core"
            rows.append(measured(told, setting, share, "%", aim=at_most(10.0)))
    report("bench_control_plane", rows, asked.out, seconds=time.monotonic() - began)
    return sum(row.met is False for row in rows)


if __name__ == "__main__":
    sys.exit(main())
