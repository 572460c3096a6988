"""What a whole training step costs in every FP8 recipe and in torchao's emulations, against BF16.

    python -m tests.benchmarks.bench_fp8_step [--repeats 15] [--numerics bf16 delayed …] [--out DIR]

The demo's model, batches and optimizer on one rank and one thread: an engine for each numerics in
one process, which take turns step by step in an order that changes, each going on with its own
training; torchao's linears are compiled before anything is timed. Time is that of the processor.
Octavo's recipes count their statistics in every step, as in a job. One that can't train is told
with its error and left out of the turns.
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Callable, Sequence

from tests.benchmarks.demo_runs import batches_of
from tests.benchmarks.numerics import (
    ALL,
    BF16,
    CONTROL,
    available,
    run_of,
    side_of,
    take_over,
)
from tests.benchmarks.results import Result, add_arguments, measured, report
from tests.ranks.launch_ranks import run_ranks

WARM_UP = 2
"""Steps of each that aren't counted: they compile, allocate, calibrate."""
SCHEDULE = 500
LONGEST_S = 2 * 3600.0

Told = tuple[dict[str, list[float]], dict[str, str]]


def step_seconds(rank: int, world_size: int, names: Sequence[str], repeats: int) -> Told:
    """Seconds of each repeat's step by numerics, and why others gave none. For ``run_ranks``."""
    steps: dict[str, Callable[[int], None]] = {}
    failed: dict[str, str] = {}
    for name in names:
        try:
            steps[name] = _stepper(name, world_size)
            for step in range(WARM_UP):
                steps[name](step)
        except Exception as error:
            failed[name] = f"{type(error).__name__}: {error}"
            steps.pop(name, None)
    order = random.Random(0)
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    for repeat in range(repeats):
        # In another order each time: what ran before leaves its traces in the caches.
        for name in order.sample(list(steps), len(steps)):
            started = time.process_time()
            steps[name](WARM_UP + repeat)
            seconds[name].append(time.process_time() - started)
    return seconds, failed


def _stepper(name: str, world_size: int) -> Callable[[int], None]:
    from launch.engine import engine_of
    from launch.schedule import lr_at

    run = run_of(name, 0, SCHEDULE)
    engine = engine_of(run)
    take_over(engine._engine.module, name)
    engine.scope.collect(every_counter=True)
    of_step = batches_of(run, engine.coordinate.data, world_size)

    def step(number: int) -> None:
        float(engine.train_step(of_step(number), lr_at(number, run.training, 1.0)).loss)
        engine.scope.statistics()

    return step


def rows_of(seconds: dict[str, list[float]], failed: dict[str, str]) -> list[Result]:
    """Seconds of BF16's step, the others' over it by repeat."""
    setting = "demo model, 32 sequences of 128, one rank and thread"
    reference = seconds.get(BF16, [])
    rows = [measured("a step", setting, reference, "s", side=side_of(BF16))]
    for name, times in seconds.items():
        if name != BF16:
            ratios = [own / base for own, base in zip(times, reference, strict=True)]
            rows.append(measured("a step, over BF16's", setting, ratios, "×", side=side_of(name)))
    for name, why in failed.items():
        missed = measured("a step", setting, [], "s", side=side_of(name), failures=1, note=why)
        rows.append(missed)
    return rows


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    others = [name for name in ALL if name != CONTROL]
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--numerics", nargs="+", default=others, choices=others)
    add_arguments(parser)
    asked = parser.parse_args()
    began = time.monotonic()
    names, missing = available((BF16, *asked.numerics))
    told: list[Told] = run_ranks(step_seconds, 1, names, asked.repeats, timeout_s=LONGEST_S)
    rows = rows_of(*told[0])
    report("bench_fp8_step", rows, asked.out, seconds=time.monotonic() - began, left_out=missing)


if __name__ == "__main__":
    main()
