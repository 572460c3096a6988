"""A step inside Octavo with everything on, against the same training by what starts plain scripts.

    python -m tests.benchmarks.bench_overhead [--rounds 3] [--steps 240] [--layouts 2x2 1x1]
        [--sides octavo torchrun deepspeed ray_train] [--folder runs/peers] [--out DIR]

The demo's model without its drill: telemetry every step, snapshots, detectors, store, W&B
offline and standby workers on one side; on the others the plain script under torchrun and under
DeepSpeed's launcher, and its loop as a TorchTrainer's training function, with nothing of that. The
sides take turns. A run's time a step is the mean over its second half, so that what Octavo does
each tenth step (snapshots, replica checks) and each hundredth (a checkpoint) is in it; each round
gives a ratio to torchrun's. All must show the same losses to the bit. The processor time that all
processes of a side took in the same steps is told by what they are: where no core is free, that is
what makes a step longer.

A layout is pipeline x data. On two cores the demo's 2x2 leaves no core free: all that Octavo
does beside training takes its time from a rank, which is the worst that can be. 1x1 leaves it a
core, as a node does whose ranks compute on devices.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from orchestrator.spec.job import JobSpec, load_spec
from tests.benchmarks.peers.environments import (
    FOLDER,
    Environment,
    Unavailable,
    environment_of,
    releases,
)
from tests.benchmarks.peers.processes import ROOT, interrupt_on_signals
from tests.benchmarks.peers.turns import Failed, failures, hangs, take_turns, values, why
from tests.benchmarks.processor_time import ProcessorMeter
from tests.benchmarks.results import OCTAVO, Result, add_arguments, at_most, measured, report
from tests.benchmarks.sides import (
    Run,
    cluster,
    under_deepspeed,
    under_octavo,
    under_ray_train,
    under_torchrun,
)

PLAIN, RAY_TRAIN = "torchrun", "ray_train"
SIDES = (OCTAVO, PLAIN, "deepspeed", RAY_TRAIN)
AIM = at_most(1.02)
ROUNDS, STEPS, LAYOUTS = 3, 240, ("2x2", "1x1")
WORTH_TELLING_S = 0.0005
"""Of a step, that a kind of process takes at least to be told by its name."""


@dataclass(frozen=True, slots=True)
class Metered:
    """A run, and what its steps took of the processor."""

    run: Run
    by_kind: Mapping[str, float]
    """Kind of process → seconds of a core a step, in the second half of the run."""

    @property
    def total(self) -> float:
        return sum(self.by_kind.values()) if self.by_kind else float("nan")

    def told(self) -> str:
        """``ranks 590 ms, Supervisor 12, …``, most first."""
        most = sorted(self.by_kind.items(), key=lambda item: -item[1])
        return ", ".join(f"{kind} {1e3 * s:.3g}" for kind, s in most if s >= WORTH_TELLING_S)


def main() -> None:
    """Print a line a turn, then the table."""
    interrupt_on_signals()
    parser = argparse.ArgumentParser()
    _add_numbers(parser, ROUNDS)
    parser.add_argument("--sides", nargs="+", choices=SIDES, default=list(SIDES))
    parser.add_argument("--folder", type=Path, default=FOLDER, help="the peers' environments")
    add_arguments(parser)
    arguments = parser.parse_args()
    began = time.monotonic()
    ray_train: Environment | Unavailable | None = None
    if RAY_TRAIN in arguments.sides:
        ray_train = environment_of(RAY_TRAIN, arguments.folder.resolve())
    rows = []
    for layout in arguments.layouts:
        spec = on_layout(layout, arguments.steps)
        rows += _compared(layout, spec, arguments.rounds, arguments.sides, ray_train)
    left_out = {RAY_TRAIN: ray_train.reason} if isinstance(ray_train, Unavailable) else {}
    report(
        "bench_overhead",
        rows,
        arguments.out,
        seconds=time.monotonic() - began,
        left_out=left_out,
        versions=releases(arguments.sides, arguments.folder.resolve()),
    )


def _compared(
    layout: str,
    spec: JobSpec,
    rounds: int,
    names: Sequence[str],
    ray_train: Environment | Unavailable | None,
) -> list[Result]:
    """The rows of one layout."""
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        sides: dict[str, Callable[[], Run]] = {
            OCTAVO: partial(_octavo, spec, place),
            PLAIN: partial(under_torchrun, spec, place),
            "deepspeed": partial(under_deepspeed, spec, place),
        }
        if isinstance(ray_train, Environment):
            sides[RAY_TRAIN] = partial(under_ray_train, spec, place, ray_train)

        def tell(turn: int, side: str, found: Metered | Failed) -> None:
            if isinstance(found, Failed):
                what = found.why
            else:
                what = f"{1e3 * found.run.step_s:.1f} ms a step; processor, ms: {found.told()}"
            print(f"{layout}, round {turn}, {side}: {what}", flush=True)

        chosen = {name: partial(metered, side) for name, side in sides.items() if name in names}
        told = take_turns(chosen, rounds, tell)
    return rows_of(f"demo model, {layout}", told)


def metered(side: Callable[[], Run]) -> Metered:
    """A run of ``side`` with what its settled steps took. Raises SideError."""
    with ProcessorMeter() as meter:
        run = side()
    taken = meter.between(*run.settled)
    return Metered(run, {kind: seconds / len(run.gaps) for kind, seconds in taken.items()})


def rows_of(setting: str, told: Mapping[str, Sequence[Metered | Failed]]) -> list[Result]:
    """Times of all, of steps and of the processor, and of each but torchrun its ratio in rounds
    that have both, and how many losses differ. Failures and hangs are the side's own; torchrun's
    are told."""
    rows = []
    for side, found in told.items():
        counts: dict[str, Any] = {"side": side, "failures": failures(found), "hangs": hangs(found)}
        steps = [each.run.step_s for each in values(found)]
        rows.append(measured("a step", setting, steps, "s", note=why(found), **counts))
        taken = [each.total for each in values(found)]
        last = f"in the last round, ms: {values(found)[-1].told()}" if taken else ""
        rows.append(measured("processor time a step", setting, taken, "s", note=last, **counts))
        if side == PLAIN or PLAIN not in told:
            continue
        pairs = [
            (its.run, plain.run)
            for its, plain in zip(found, told[PLAIN], strict=True)
            if isinstance(its, Metered) and isinstance(plain, Metered)
        ]
        ratios = [run.step_s / plain.step_s for run, plain in pairs]
        differing = [
            sum(a != b for a, b in zip(run.losses, plain.losses, strict=True))
            for run, plain in pairs
        ]
        aim, equal = (AIM, at_most(0)) if side == OCTAVO else (None, None)
        counts["note"] = why(told[PLAIN], of=f"{PLAIN}:")
        rows.append(measured("a step over torchrun's", setting, ratios, "×", aim=aim, **counts))
        name = "steps of another loss than torchrun's"
        rows.append(measured(name, setting, differing, "", aim=equal, **counts))
    return rows


def _octavo(spec: JobSpec, folder: Path) -> Run:
    assert spec.slots_per_node is not None
    with cluster(folder / "home", slots=spec.slots_per_node) as client:
        return under_octavo(client, spec)


def _add_numbers(parser: argparse.ArgumentParser, rounds: int) -> None:
    parser.add_argument("--rounds", type=int, default=rounds)
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--layouts", nargs="+", default=list(LAYOUTS), metavar="PxD")


def compare_layouts(
    benchmark: str, compare: Callable[[str, int, int], list[Result]], rounds: int
) -> None:
    """Report the rows of ``compare(layout, rounds, steps)`` for each layout that the command line
    asks for."""
    parser = argparse.ArgumentParser()
    _add_numbers(parser, rounds)
    add_arguments(parser)
    arguments = parser.parse_args()
    began = time.monotonic()
    rows = [
        row
        for layout in arguments.layouts
        for row in compare(layout, arguments.rounds, arguments.steps)
    ]
    report(benchmark, rows, arguments.out, seconds=time.monotonic() - began)


def on_layout(layout: str, steps: int) -> JobSpec:
    """The demo on another layout, with as many sequences a replica."""
    pipeline, data = (int(degree) for degree in layout.split("x"))
    demo = load_spec(ROOT / "deploy/jobs/demo.yaml")
    assert demo.training.train_batch_size is not None and demo.parallelism.data is not None
    batch = demo.training.train_batch_size // demo.parallelism.data * data
    degrees = {"pipeline": pipeline, "data": data}
    return demo.model_copy(
        update={
            "slots_per_node": pipeline * data,
            "parallelism": demo.parallelism.model_copy(update=degrees),
            "training": demo.training.model_copy(
                update={"steps": steps, "train_batch_size": batch}
            ),
            "drills": (),
        }
    )


if __name__ == "__main__":
    main()
