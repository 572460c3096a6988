"""What FP8 does to one step: its loss and gradient against BF16's, of the same weights and batch.

    python -m tests.benchmarks.bench_fidelity [--after 60] [--batches 4] [--numerics delayed …]
                                              [--out DIR]

Curves of whole runs drift apart by chance (bench_parity); one step doesn't. The demo's model
trains ``--after`` steps in BF16. Then each of the next batches has its gradient taken in BF16
and in every recipe, with a learning rate of 0. ``batch noise`` is how far the gradients of a
batch's two halves are apart, over the batch's: what stochastic training lives with. The same for
torchao's emulations, and for the recipe ``current`` written a second time (``emulation.py``).
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from orchestrator.spec.job import JobSpec
from parallel.engine import Engine
from tests.benchmarks.demo_runs import batches_of
from tests.benchmarks.numerics import (
    ALL,
    BF16,
    CONTROL,
    RECIPES,
    available,
    run_of,
    side_of,
    take_over,
)
from tests.benchmarks.results import Result, add_arguments, measured, report
from tests.ranks.launch_ranks import RankFailed, run_ranks

SCHEDULE = 500
"""Steps of the run whose beginning is trained."""
LONGEST_S = 3600.0

Gradients = dict[str, Tensor]


@dataclass(frozen=True, slots=True)
class Fidelity:
    """One recipe's step against BF16's, batch by batch."""

    loss: list[float]
    """Of the loss, relative; signed."""
    gradient: list[float]
    """2-norm of the gradient's difference over the gradient's."""
    cosine: float
    """Mean."""
    worst: float
    """Difference of the parameter that has the largest, over that parameter's gradient; mean."""
    worst_name: str
    batch_noise: list[float]


def fidelity(
    rank: int, world_size: int, run: JobSpec, numerics: str, after: int, batches: int
) -> Fidelity:
    """Of ``run``, which is ``numerics``'. For ``run_ranks``."""
    from launch.engine import engine_of
    from launch.schedule import lr_at

    engine = engine_of(run)
    of_step = batches_of(run, engine.coordinate.data, world_size)
    _precision(engine, "bf16")
    for step in range(after):
        engine.train_step(of_step(step), lr_at(step, run.training, 1.0))
    take = _gradient_taker(engine)
    steps = range(after, after + batches)

    def all_steps() -> list[tuple[float, list[Gradients]]]:
        return [(float(engine.train_step(of_step(s), 0.0).loss), take()) for s in steps]

    exact = all_steps()
    take_over(engine._engine.module, numerics)
    _precision(engine, "fp8")
    engine.train_step(of_step(after), 0.0)  # calibrates what returns
    take()
    return _compared(exact, all_steps())


def _precision(engine: Engine, precision: str) -> None:
    engine.set_precision(dict.fromkeys(engine.scope.layers, precision))


def _gradient_taker(engine: Engine) -> Callable[[], list[Gradients]]:
    """What takes the gradients of the micro-batches since its last call."""
    seen: dict[str, list[Tensor]] = {}
    for name, parameter in engine._engine.module.named_parameters():
        parameter.register_hook(
            lambda gradient, name=name: seen.setdefault(name, []).append(gradient.float())
        )

    def take() -> list[Gradients]:
        count = max(map(len, seen.values()))
        told = [{name: of_name[i] for name, of_name in seen.items()} for i in range(count)]
        seen.clear()
        return told

    return take


def _compared(
    exact: list[tuple[float, list[Gradients]]], rounded: list[tuple[float, list[Gradients]]]
) -> Fidelity:
    losses, gradients, cosines, noises = [], [], [], []
    of_parameter: dict[str, list[float]] = {}
    for (loss, halves), (loss_q, halves_q) in zip(exact, rounded, strict=True):
        whole, whole_q = _sum(halves), _sum(halves_q)
        g, q = _flat(whole), _flat(whole_q)
        losses.append(loss_q / loss - 1)
        gradients.append(float((q - g).norm() / g.norm()))
        cosines.append(float(torch.nn.functional.cosine_similarity(q, g, dim=0)))
        noises.append(float((_flat(halves[0]) - _flat(halves[1])).norm() / g.norm()))
        for name, value in whole.items():
            error = float((whole_q[name] - value).norm() / value.norm())
            of_parameter.setdefault(name, []).append(error)
    errors = {name: statistics.fmean(of_name) for name, of_name in of_parameter.items()}
    worst = max(errors, key=errors.__getitem__)
    mean = statistics.fmean
    return Fidelity(losses, gradients, mean(cosines), errors[worst], worst, noises)


def _sum(parts: list[Gradients]) -> Gradients:
    return {name: torch.stack([part[name] for part in parts]).sum(0) for name in parts[0]}


def _flat(gradients: Gradients) -> Tensor:
    return torch.cat([gradients[name].flatten() for name in sorted(gradients)])


def main() -> None:
    """Print a line a recipe, then the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--after", type=int, default=60)
    parser.add_argument("--batches", type=int, default=4)
    others = [name for name in ALL if name not in (BF16, CONTROL)]
    parser.add_argument("--numerics", nargs="+", default=others, choices=others)
    add_arguments(parser)
    asked = parser.parse_args()
    began = time.monotonic()
    names, missing = available(asked.numerics)
    rows: list[Result] = []
    noise: list[float] = []
    setting = f"demo model after {asked.after} steps"
    for name in names:
        run = run_of(name, 0, SCHEDULE)
        try:
            told: list[Fidelity] = run_ranks(
                fidelity, 1, run, name, asked.after, asked.batches, timeout_s=LONGEST_S
            )
        except RankFailed as error:
            print(f"{name}: {error}", flush=True)
            hung = "silent for" in str(error)
            missed = {"failures": int(not hung), "hangs": int(hung)}
            rows.append(measured("gradient off", setting, [], "%", side=side_of(name), **missed))
            continue
        rows += rows_of(name, setting, told[0])
        if name in RECIPES and not noise:
            noise = told[0].batch_noise
    if noise:
        noises = [100 * value for value in noise]
        rows.append(measured("halves of a batch apart", setting, noises, "%", side="BF16"))
    report("bench_fidelity", rows, asked.out, seconds=time.monotonic() - began, left_out=missing)


def rows_of(name: str, setting: str, found: Fidelity) -> list[Result]:
    """One step's loss and gradient, off BF16's."""
    side = side_of(name)
    note = f"cosine {found.cosine:.5f}; most in {found.worst_name}: {100 * found.worst:.1f} %"
    losses, gradients = ([100 * v for v in values] for values in (found.loss, found.gradient))
    return [
        measured("one step's loss, above BF16", setting, losses, "%", side=side),
        measured("its gradient, off BF16", setting, gradients, "%", side=side, note=note),
    ]


if __name__ == "__main__":
    main()
