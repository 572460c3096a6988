"""The control plane at scale, on one machine: how each cost grows with jobs, and with ranks.

    python -m tests.benchmarks.bench_control_plane [--jobs 10,100,1000,10000]
        [--running 1,10,100,1000] [--ranks 8,64,512,4096,16384] [--parts queue,…] [--out DIR]

Real: controller, store on disk, HTTP API on the loopback, the supervisor's loop, detectors, merging
of reports. Scripted: nodes, supervisors as the controller sees them, ranks. Each size has a store
and a process of its own. Printed are median and p99 a size, the growth exponent (the slope of the
medians, least squares on logarithmic paper) and the steepest of the slopes between neighbouring
sizes: what a cost of its own at each call flattens in the one shows in the other. Fails where
the first is above 1 or the other above 1.2, that is, where something grows faster than what it is
made for; and where an aim in the table is missed. A size whose process fails or hangs is counted,
and the others have their turn.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tests.benchmarks.peers.processes import SideError, end_all, environment, new_mark
from tests.benchmarks.peers.turns import Failed, failures, hangs, why
from tests.benchmarks.results import Aim, Result, add_arguments, at_most, measured, report
from tests.benchmarks.results import shown as in_words

JOBS = (10, 100, 1_000, 10_000)
RUNNING = (1, 10, 100, 1_000)
RANKS = (8, 64, 512, 4_096, 16_384)
LINEAR = 1.0
STEEPEST = 1.2
"""Between two sizes alone: linear, and two medians that are a sixth off in opposite ways."""
LIMIT_S = 3600.0
"""Of one size of one part."""


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
    failed: dict[int, Failed] = field(default_factory=dict)
    """Sizes that gave nothing."""

    def rows(self) -> list[Result]:
        """A row a size, one of the p99 where it has an aim, two of the growth."""
        found = []
        for size in sorted({*self.values, *self.failed}):
            where = f"{size:,} {self.of}"
            seconds = self.values.get(size, [])
            worst = [p99(seconds)] if seconds else []
            counts: dict[str, Any] = {}
            told = "".join(f"p99 {in_words(value, 's')}" for value in worst)
            if size in self.failed:
                counts = _counts([self.failed[size]])
                told = why([self.failed[size]])
            found.append(measured(self.name, where, seconds, "s", note=told, **counts))
            if size in self.aims:
                name, aim = f"{self.name}, p99", self.aims[size]
                found.append(measured(name, where, worst, "s", aim=aim, **counts))
        return found + self._growth()

    def _growth(self) -> list[Result]:
        """From the least size to the largest, all of them needed for the aim."""
        sizes = sorted({*self.values, *self.failed})
        if len(sizes) < 2:
            return []
        medians = {size: statistics.median(self.values[size]) for size in sorted(self.values)}
        where = f"{sizes[0]:,} to {sizes[-1]:,} {self.of}"
        aim, steepest_aim = (at_most(LINEAR), at_most(STEEPEST)) if self.linear else (None, None)
        counts = _counts(list(self.failed.values()))
        enough = len(medians) > 1
        fitted = [slope(medians)] if enough else []
        steepest, at = steepest_of(medians) if enough else (math.nan, "")
        return [
            measured(f"{self.name}, exponent", where, fitted, "", aim=aim, **counts),
            measured(
                f"{self.name}, steepest between neighbouring sizes",
                where,
                [steepest] if enough else [],
                "",
                aim=steepest_aim,
                note=at,
                **counts,
            ),
        ]


def _counts(failed: Sequence[Failed]) -> dict[str, Any]:
    return {"failures": failures(failed), "hangs": hangs(failed)}


def steepest_of(values: Mapping[int, float]) -> tuple[float, str]:
    """The largest slope between neighbouring sizes, and between which."""
    pairs = list(itertools.pairwise(sorted(values)))
    slopes = {pair: slope({size: values[size] for size in pair}) for pair in pairs}
    (low, high), steepest = max(slopes.items(), key=lambda of: of[1])
    return steepest, f"{low:,} to {high:,}"


def slope(values: Mapping[int, float]) -> float:
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
    """What ``PARTS[part]`` finds in a process and a folder of its own. Raises SideError."""
    mark = new_mark()
    with tempfile.TemporaryDirectory(prefix="octavo-bench-control-") as folder:
        command = [sys.executable, "-m", "tests.benchmarks.control_plane_parts", part, folder]
        command += map(str, arguments)
        try:
            done = subprocess.run(
                command, stdout=subprocess.PIPE, env=environment(mark), timeout=LIMIT_S, check=True
            )
            return json.loads(done.stdout.decode().splitlines()[-1])
        except subprocess.TimeoutExpired as error:
            raise SideError(f"{part} was not over after {LIMIT_S:.0f} s", hung=True) from error
        except (subprocess.CalledProcessError, ValueError, IndexError) as error:
            raise SideError(f"{part}: {error}") from error
        finally:
            end_all(mark)


def grown(sizes: Iterable[int], part: str, growths: Sequence[Growth], *arguments: object) -> None:
    """Run ``part`` at each size; its answer has a list of seconds by each growth's name."""
    for size in sizes:
        began = time.monotonic()
        try:
            found = in_a_process(part, size, *arguments)
        except SideError as error:
            found = {"told": str(error)}
            failed = Failed(str(error), error.hung)
        else:
            failed = Failed(f"{part} told no such values", hung=False)
        for growth in growths:
            if found.get(growth.name):
                growth.values[size] = found[growth.name]
            else:
                growth.failed[size] = failed
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
        rows += [row for growth in growths for row in growth.rows()]
    if "running" in asked.parts:
        running = [
            Growth("batch of a step stored", "jobs that run"),
            Growth("a round: a step of every job", "jobs that run"),
            Growth("pass over running jobs", "jobs that run"),
        ]
        grown(asked.running, "running", running)
        rows += [row for growth in running for row in growth.rows()]
    if "telemetry" in asked.parts:
        merging = [
            Growth("a step's reports, each rank on its own, at the supervisor", "ranks"),
            Growth("the same by a tree, at the supervisor", "ranks"),
            Growth("at the node that merges most", "ranks"),
        ]
        grown(asked.ranks, "telemetry", merging)
        rows += [row for growth in merging for row in growth.rows()]
    if "supervisor" in asked.parts:
        setting = "10 steps/s, 1,002 tensors, 8 ranks"
        for name, part in (("", "supervisor"), (" with W&B offline", "with_wandb")):
            told, failed, share = f"supervisor{name}, of a core", [], []
            try:
                share = [100 * value for value in in_a_process(part, 1000)["share"]]
            except SideError as error:
                failed = [Failed(str(error), error.hung)]
            counts, note = _counts(failed), why(failed)
            aim = at_most(10.0)
            rows.append(measured(told, setting, share, "%", aim=aim, note=note, **counts))
    report("bench_control_plane", rows, asked.out, seconds=time.monotonic() - began)
    return sum(row.met is False for row in rows)


if __name__ == "__main__":
    sys.exit(main())
