"""Who trains and how gradients are exchanged: Octavo's engine, and DDP with its hooks.

    step = stepper(Side("ddp", "powersgd", rank=4), run_of(SHAPES["demo"], side, seed, steps), …)
    loss = step(0)

Promises: all sides have the same model, initial weights, batches, schedule, optimizer and
replicas (two ranks of one thread; parameters and optimizer whole on each, which is ZeRO 0), and
linears in BF16, so that engines and exchanges alone differ.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from orchestrator.spec.job import JobSpec
from parallel.config import GradientExchangeConfig
from tests.benchmarks.demo_runs import MICRO_BATCH, batches_of, demo_run
from tests.benchmarks.results import OCTAVO

REPLICAS = 2
DDP = "ddp"


@dataclass(frozen=True, slots=True)
class Side:
    """One way to train."""

    trainer: Literal["octavo", "ddp"]
    exchange: Literal["fp32", "bf16", "fp8", "powersgd"]
    rank: int = 0
    """PowerSGD's."""
    error_feedback: bool = False
    """Octavo's; PowerSGD always has its own."""
    other_sums: bool = False
    """Micro-batches of half the size: another order of sums, and so what chance does."""

    @property
    def name(self) -> str:
        """As in the table."""
        told = {
            "powersgd": f"PowerSGD hook, rank {self.rank}",
            "bf16": "BF16" if self.trainer == OCTAVO else "BF16 hook",
        }.get(self.exchange, self.exchange.upper())
        told += ", error feedback" if self.error_feedback else ""
        told += ", other sums" if self.other_sums else ""
        return f"{OCTAVO if self.trainer == OCTAVO else 'DDP'} {told}"


@dataclass(frozen=True, slots=True)
class Shape:
    """A model and its batch."""

    told: str
    batch: int
    """Sequences a step over both replicas."""
    model: tuple[tuple[str, int], ...] = ()
    """What of the demo's model is another."""


SHAPES = {
    "demo": Shape("demo model, 1.2 M parameters, 32 sequences a step", 32),
    "wide": Shape(
        "4 layers of 512, 11 M parameters, 4 sequences a step",
        4,
        (
            ("hidden_size", 512),
            ("ffn_size", 1376),
            ("num_layers", 4),
            ("num_heads", 8),
            ("num_kv_heads", 2),
        ),
    ),
}
FP8 = Side("octavo", "fp8")
REFERENCES = (Side("octavo", "fp32"), Side(DDP, "fp32"))
CONTROLS = tuple(Side(side.trainer, "fp32", other_sums=True) for side in REFERENCES)


def sides(ranks: Sequence[int]) -> tuple[Side, ...]:
    """All but the controls; ``ranks``: PowerSGD's, in order."""
    return (
        *REFERENCES,
        Side("octavo", "bf16"),
        FP8,
        Side("octavo", "fp8", error_feedback=True),
        Side(DDP, "bf16"),
        *(Side(DDP, "powersgd", rank) for rank in sorted(set(ranks))),
    )


def run_of(shape: Shape, side: Side, seed: int, steps: int) -> JobSpec:
    """The run of one rank of ``REPLICAS``."""
    run = demo_run(
        seed,
        steps,
        replicas=REPLICAS,
        micro_batch=MICRO_BATCH // 2 if side.other_sums else MICRO_BATCH,
        precision="bf16",
        communication_data_type="fp32" if side.exchange == "powersgd" else side.exchange,
        gradient_exchange=GradientExchangeConfig(error_feedback=side.error_feedback),
    )
    training: dict[str, Any] = {}
    if shape.batch < MICRO_BATCH * REPLICAS:
        training = {
            "train_batch_size": shape.batch,
            "train_micro_batch_size_per_gpu": shape.batch // REPLICAS,
            "gradient_accumulation_steps": 1,
        }
    return run.model_copy(
        update={
            "parallelism": run.parallelism.model_copy(update={"zero_stage": 0}),
            "model": run.model.model_copy(update=dict(shape.model)),
            "training": run.training.model_copy(update=training),
        }
    )


def stepper(side: Side, run: JobSpec, rank: int, starts: int) -> Callable[[int], float]:
    """What trains step ``n`` of ``run`` on this rank and gives its loss, the mean over replicas.

    The default process group must exist; every rank calls it. ``starts``: PowerSGD's.
    """
    from launch.schedule import lr_at

    if side.trainer == OCTAVO:
        from launch.engine import engine_of

        engine = engine_of(run)
        of_step = batches_of(run, engine.coordinate.data, REPLICAS)

        def train(step: int) -> float:
            return float(engine.train_step(of_step(step), lr_at(step, run.training, 1.0)).loss)

        return train

    from tests.benchmarks.peers.ddp_training import DDPTraining, Hook

    assert side.exchange != "fp8"
    training = DDPTraining(run, Hook(side.exchange, side.rank, starts))
    batches = batches_of(run, rank, REPLICAS)
    return lambda step: training.train_step(batches(step), lr_at(step, run.training, 1.0))


def starts_of(steps: int, warm_up: int) -> int:
    """The step at which PowerSGD begins, as its documentation advises: after a tenth of the steps
    and the schedule's warm-up; in a run too short for that, half-way."""
    return min(max(steps // 10, warm_up), steps // 2)


def losses(rank: int, world_size: int, side: Side, run: JobSpec) -> list[float]:
    """The loss of each step of the run; for ``run_ranks``."""
    training = run.training
    starts = starts_of(training.steps, training.warmup_steps)
    step = stepper(side, run, rank, starts)
    return [step(number) for number in range(training.steps)]
