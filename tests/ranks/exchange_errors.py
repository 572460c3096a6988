"""How far an exchange's mean is from the float64 mean, once and in the long run.

For the tests and ``tests.benchmarks.bench_exchange_error``: ``errors`` is a rank's body.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
import yaml
from torch import Tensor

from launch.config import RunConfig
from launch.data import TokenStream
from launch.engine import engine_of
from launch.schedule import lr_at
from parallel.config import ExchangeDtype, GradientExchangeConfig
from parallel.gradients import GradientExchange

DEMO = Path(__file__).parents[2] / "deploy" / "jobs" / "demo.yaml"


@dataclass(frozen=True)
class Way:
    """One way to exchange."""

    dtype: ExchangeDtype = "fp8"
    format: str = "e4m3"
    scattered: bool = False
    """As under a sharded optimizer: a rank takes its own part's mean, which isn't rounded."""
    error_feedback: bool = False


@dataclass(frozen=True)
class Errors:
    """2-norms over the exact mean's, the same on every rank."""

    one: float
    """Of one exchange's mean."""
    lasting: float
    """Of the mean over all repeats of the same gradients."""


def made_up(kind: str, numel: int, rank: int) -> Tensor:
    """float32 [numel]: ``normal``, or ``heavy``: Student's t with two degrees of freedom."""
    draw = np.random.default_rng(rank)
    x = draw.standard_normal(numel) if kind == "normal" else draw.standard_t(2, numel)
    return torch.from_numpy(1e-3 * x).float()


def recorded(world_size: int, steps: int) -> Tensor:
    """This rank's gradient of the demo's matrices before the exchange of step ``steps - 1``."""
    demo = yaml.safe_load(DEMO.read_text())
    training = demo["training"]
    training["gradient_accumulation_steps"] = (
        training["train_batch_size"] // training["train_micro_batch_size_per_gpu"] // world_size
    )
    sections = ("model", "data", "precision", "fp8")
    run = RunConfig.model_validate(
        {
            **{name: demo[name] for name in sections},
            "training": training,
            "parallelism": {"data": world_size},
        }
    )
    engine = engine_of(run)
    hooks, kept = engine._hooks, []
    exchange = hooks.exchange

    def keep(flats: list[Tensor]) -> None:
        kept[:] = [flats[0].clone()]
        exchange(flats)

    hooks.exchange = keep
    stream = TokenStream(run.data, run.training.seq_len)
    for step in range(steps):
        batches = stream.micro_batches(
            step,
            engine.coordinate.data,
            world_size,
            training["train_micro_batch_size_per_gpu"],
            training["gradient_accumulation_steps"],
        )
        engine.train_step(batches, lr_at(step, run.training))
    return kept[0].float()


def errors(
    rank: int, world_size: int, kind: str, size: int, ways: list[Way], repeats: int
) -> list[Errors]:
    """Errors of each way. ``kind``: of ``made_up`` with ``size`` elements, or ``recorded``
    after ``size`` steps."""
    mine = recorded(world_size, size) if kind == "recorded" else made_up(kind, size, rank)
    mine = mine[: mine.numel() // world_size * world_size]
    exact = mine.double()
    dist.all_reduce(exact)
    exact /= world_size
    return [_errors(way, mine, exact, rank, world_size, repeats) for way in ways]


def _errors(
    way: Way, mine: Tensor, exact: Tensor, rank: int, world_size: int, repeats: int
) -> Errors:
    config = GradientExchangeConfig(min_size=0, format=way.format)
    group = dist.group.WORLD
    assert group is not None
    exchange = GradientExchange(way.dtype, config, group, scattered=way.scattered)
    residual = torch.zeros_like(mine) if way.error_feedback else None
    share = mine.numel() // world_size
    # Of what all ranks hold alike each counts its own part, so that norms add up in both cases.
    part = slice(rank * share, (rank + 1) * share)
    total = torch.zeros(share, dtype=torch.float64)
    first = None
    for _ in range(repeats):
        flat = mine.clone()
        exchange.mean_(flat, residual=residual)
        total += flat[part].double()
        if first is None:
            first = flat[part].double()
    assert first is not None
    target = exact[part]
    squares = torch.stack(
        [
            (first - target).square().sum(),
            (total / repeats - target).square().sum(),
            target.square().sum(),
        ]
    )
    dist.all_reduce(squares)
    one, lasting, norm = squares.sqrt().tolist()
    return Errors(one / norm, lasting / norm)
