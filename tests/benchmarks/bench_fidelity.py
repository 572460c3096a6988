"""What FP8 does to one step: its loss and gradient against BF16's, of the same weights and batch.

    python -m tests.benchmarks.bench_fidelity [--after 60] [--batches 4]

Curves of whole runs drift apart by chance (bench_parity); one step doesn't. The demo's model
trains ``--after`` steps in BF16. Then each of the next batches has its gradient taken in BF16
and in every recipe, with a learning rate of 0. ``batch noise`` is how far the gradients of a
batch's two halves are apart, over the batch's: what stochastic training lives with. The last
row is the recipe ``current`` written a second time (``emulation.py``).
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from orchestrator.spec.job import JobSpec
from parallel.engine import Engine
from tests.benchmarks.bench_parity import RECIPES, fp8_of
from tests.benchmarks.demo_runs import batches_of, demo_run
from tests.benchmarks.emulation import Formats, take_over
from tests.ranks.launch_ranks import run_ranks

SCHEDULE = 500
"""Steps of the run whose beginning is trained."""
LONGEST_S = 3600.0

Gradients = dict[str, Tensor]


@dataclass(frozen=True, slots=True)
class Fidelity:
    """One recipe's step against BF16's: means over the batches."""

    loss: float
    """Of the loss, relative; signed."""
    gradient: float
    """2-norm of the gradient's difference over the gradient's."""
    cosine: float
    worst: float
    """The difference of the parameter that has the largest, over that parameter's gradient."""
    worst_name: str
    batch_noise: float


def fidelity(rank: int, world_size: int, run: JobSpec, after: int, batches: int) -> Fidelity:
    """Of ``run``'s recipe; of the emulation where ``run`` is in BF16. For ``run_ranks``."""
    from launch.engine import engine_of
    from launch.schedule import lr_at

    engine = engine_of(run)
    of_step = batches_of(run, engine, world_size)
    _precision(engine, "bf16")
    for step in range(after):
        engine.train_step(of_step(step), lr_at(step, run.training, 1.0))
    take = _gradient_taker(engine)
    steps = range(after, after + batches)

    def all_steps() -> list[tuple[float, list[Gradients]]]:
        return [(float(engine.train_step(of_step(s), 0.0).loss), take()) for s in steps]

    exact = all_steps()
    if run.precision == "bf16":
        take_over(Formats())
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
    return Fidelity(
        mean(losses), mean(gradients), mean(cosines), errors[worst], worst, mean(noises)
    )


def _sum(parts: list[Gradients]) -> Gradients:
    return {name: torch.stack([part[name] for part in parts]).sum(0) for name in parts[0]}


def _flat(gradients: Gradients) -> Tensor:
    return torch.cat([gradients[name].flatten() for name in sorted(gradients)])


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--after", type=int, default=60)
    parser.add_argument("--batches", type=int, default=4)
    asked = parser.parse_args()
    print("| recipe | loss | gradient | cosine | worst parameter | batch noise |")
    print("|---|---|---|---|---|---|")
    for recipe in (*RECIPES[1:], "bf16"):
        run = demo_run(
            0,
            SCHEDULE,
            precision="bf16" if recipe == "bf16" else "fp8",
            fp8=fp8_of(recipe),
            communication_data_type="fp32",
        )
        told: list[Fidelity] = run_ranks(
            fidelity, 1, run, asked.after, asked.batches, timeout_s=LONGEST_S
        )
        row = told[0]
        print(
            f"| {'emulation' if recipe == 'bf16' else recipe} | {100 * row.loss:+.3f} % | "
            f"{100 * row.gradient:.1f} % | {row.cosine:.5f} | "
            f"{100 * row.worst:.1f} % {row.worst_name} | {100 * row.batch_noise:.0f} % |",
            flush=True,
        )


if __name__ == "__main__":
    main()
