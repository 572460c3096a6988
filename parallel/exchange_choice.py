"""``communication_data_type: auto``: FP8 where a measurement on this network says that it wins.

FP8 halves the bytes and costs casts, so it wins where the network is the limit and loses where
it isn't. Both ways exchange made-up gradients, as many as this model's, between the replicas
that will exchange the real ones, in turns. All ranks go by the slowest, because a step does.

Promises: every rank takes the same dtype; gradients, error feedback, statistics and random
generators of the job are not touched. A measurement isn't reproducible, so a job measures once
and keeps its first answer (``launch.training``).
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from parallel.config import ExchangeDtype
from parallel.gradients import GradientExchange

MOST_ELEMENTS = 2**22
"""A larger gradient is measured by a part: 4 M elements take BF16 a second at 100 Mbit."""
REPEATS = 3
LEAST_GAIN = 0.05
"""Of BF16's time; FP8 that gains less isn't worth its rounding."""

WAYS: tuple[ExchangeDtype, ExchangeDtype] = ("bf16", "fp8")


@dataclass(frozen=True, slots=True)
class ExchangeChoice:
    """What gradients cross the network in."""

    dtype: ExchangeDtype
    reason: str
    """Half a sentence for a person, with the times measured."""


@dataclass(frozen=True, slots=True)
class ExchangeTimes:
    """Medians of the slowest rank's seconds."""

    replicas: int
    numel: int
    """Elements exchanged by the rank with the most."""
    bf16_s: float
    fp8_s: float
    casts: str = "plain"
    """How FP8's casts were done on this rank; the one thing that ranks may differ in."""


def choice_of(times: ExchangeTimes) -> ExchangeChoice:
    """FP8 where it takes less than ``1 - LEAST_GAIN`` of BF16's time, else BF16. Pure."""
    if times.numel == 0:
        return ExchangeChoice("bf16", "high_precision_parameters leave nothing for FP8")
    if times.replicas == 1:
        return ExchangeChoice("bf16", "there is one replica, so nothing is exchanged")
    dtype: ExchangeDtype = "fp8" if times.fp8_s < (1 - LEAST_GAIN) * times.bf16_s else "bf16"
    reason = (
        f"{times.numel:,} elements between {times.replicas} replicas take "
        f"{1000 * times.fp8_s:.1f} ms in FP8 (casts: {times.casts}) and "
        f"{1000 * times.bf16_s:.1f} ms in BF16"
    )
    return ExchangeChoice(dtype, reason)


def measure(
    exchanges: Sequence[tuple[GradientExchange, int]], world: dist.ProcessGroup
) -> ExchangeTimes:
    """Time both ways; ``exchanges`` are this rank's, each with the size of its gradient.

    A collective of ``world``, which is all ranks' group on CPU; the times are the same on each.
    """
    replicas = max((exchange.ranks for exchange, _ in exchanges), default=1)
    sizes = [_measured(numel, exchange.ranks) for exchange, numel in exchanges]
    seconds = torch.zeros(REPEATS, len(WAYS), dtype=torch.float64)
    if replicas > 1:
        # The first round makes buffers and connections, and isn't counted.
        ways = [[exchange.another(dtype) for exchange, _ in exchanges] for dtype in WAYS]
        for repeat in range(-1, REPEATS):
            for way, copies in enumerate(ways):
                taken = _seconds(copies, sizes, world)
                if repeat >= 0:
                    seconds[repeat, way] = taken
    counts = torch.tensor([sum(sizes), replicas], dtype=torch.float64)
    agreed = torch.cat([seconds.flatten(), counts])
    dist.all_reduce(agreed, op=dist.ReduceOp.MAX, group=world)
    bf16_s, fp8_s = agreed[:-2].view_as(seconds).median(0).values.tolist()
    casts = next((exchange.casts.name for exchange, _ in exchanges), "plain")
    return ExchangeTimes(int(agreed[-1]), int(agreed[-2]), bf16_s, fp8_s, casts)


def _seconds(
    exchanges: Sequence[GradientExchange], sizes: Sequence[int], world: dist.ProcessGroup
) -> float:
    generator = torch.Generator().manual_seed(0)
    gradients = [
        torch.randn(numel, generator=generator, dtype=torch.float32).to(exchange.device)
        for exchange, numel in zip(exchanges, sizes, strict=True)
    ]
    _finish(exchanges)
    dist.barrier(world)
    started = time.perf_counter()
    for exchange, gradient in zip(exchanges, gradients, strict=True):
        exchange.mean_(gradient)
    _finish(exchanges)
    return time.perf_counter() - started


def _finish(exchanges: Sequence[GradientExchange]) -> None:
    for exchange in exchanges:
        if exchange.device.type != "cpu":
            torch.accelerator.synchronize(exchange.device)


def _measured(numel: int, ranks: int) -> int:
    """What is exchanged for a gradient of ``numel``: a multiple of the ranks, as parts must be."""
    numel = min(numel, MOST_ELEMENTS)
    return numel - numel % ranks
