"""The degrees that a job would run fastest on, of all that its checks accept.

Everything that a spec doesn't fix is tried: tensor ranks within a node, pipeline stages over nodes,
the ZeRO stage, sequences a micro-batch, recompute. ``train_batch_size`` stays, for it is part of
what is learned. Promises: deterministic, since the estimate is; what is returned has passed
``spec_checks``; among equals the fewest model ranks, then the least memory.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from orchestrator.planning.estimate import Estimate, Hardware, estimate
from orchestrator.spec.checks import check_spec
from orchestrator.spec.completion import complete, slots_per_node
from orchestrator.spec.job import JobSpec
from parallel.config import ParallelismConfig

Recompute = Literal["none", "full"]
MOST_SEQUENCES = 64
"""Sequences a micro-batch that are tried at most."""

FIXED = ("train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "recompute")
"""Keys of ``training`` that a search leaves alone where the job file gives them."""


@dataclass(frozen=True, slots=True)
class Degrees:
    """One point that is tried."""

    tensor: int
    pipeline: int
    zero_stage: int
    micro: int
    """Sequences a micro-batch."""
    recompute: Recompute

    def __str__(self) -> str:
        recompute = ", recompute" if self.recompute == "full" else ""
        return (
            f"tensor {self.tensor}, pipeline {self.pipeline}, ZeRO {self.zero_stage}, "
            f"{self.micro} a micro-batch{recompute}"
        )


@dataclass(frozen=True, slots=True)
class Choice:
    """Degrees, the completed spec on them, and what is foretold of it."""

    degrees: Degrees
    spec: JobSpec
    estimate: Estimate

    def order(self) -> tuple[float, ...]:
        """Sort key, best first."""
        at, found = self.degrees, self.estimate
        return (
            not found.fits_device,
            not found.fits_host,
            # Its memory is an estimate.
            found.fits_narrowly,
            # Where it doesn't fit, whatever is nearest to it.
            found.step.total
            if found.fits
            else found.host_bytes
            if found.fits_device
            else found.device_bytes,
            at.tensor * at.pipeline,
            found.device_bytes,
            at.tensor,
            at.zero_stage,
            at.micro,
        )


def search(
    spec: JobSpec, hardware: Hardware, fixed: Collection[str] = (), limit: int = 5
) -> tuple[list[Choice], list[Choice]]:
    """(the best ``limit`` that the checks accept, all that were tried), best first.

    ``spec``: completed, on any degrees; ``fixed``: of ``FIXED``, those whose values stay.
    """
    tried = [
        Choice(degrees, varied_spec, estimate(varied_spec, hardware))
        for degrees in _points(spec, fixed)
        if (varied_spec := varied(spec, degrees)) is not None
    ]
    tried.sort(key=Choice.order)
    best: list[Choice] = []
    for choice in tried:
        if len(best) == limit:
            break
        if accepted(choice.spec):
            best.append(choice)
    return best, tried


def accepted(spec: JobSpec) -> bool:
    """Whether the checks of a job file find nothing wrong."""
    return not check_spec(spec, set(), check_data=False)


def base_of(spec: JobSpec) -> JobSpec:
    """``spec`` completed on one replica of one rank, to be varied; batch numbers are any."""
    blank = {"train_micro_batch_size_per_gpu": None, "gradient_accumulation_steps": None}
    training = spec.training.model_copy(update=blank)
    one = ParallelismConfig(data=1)
    done = complete(spec.model_copy(update={"parallelism": one, "training": training}))
    given = {key: getattr(spec.training, key) for key in blank}
    kept = {key: value for key, value in given.items() if value is not None}
    return done.model_copy(update={"training": done.training.model_copy(update=kept)})


def degrees_of(spec: JobSpec) -> Degrees:
    """Of a completed spec."""
    training = spec.training
    assert training.train_micro_batch_size_per_gpu is not None
    return Degrees(
        spec.parallelism.tensor,
        spec.parallelism.pipeline,
        spec.parallelism.zero_stage,
        training.train_micro_batch_size_per_gpu,
        training.recompute,
    )


def varied(spec: JobSpec, degrees: Degrees) -> JobSpec | None:
    """A completed spec on other degrees, its batch the same; None where it can't be shared."""
    total = spec.training.train_batch_size
    assert total is not None, "the spec is complete"
    slots = spec.num_nodes * slots_per_node(spec)
    data, left_over = divmod(slots, degrees.tensor * degrees.pipeline)
    if left_over or not data:
        return None
    accumulation, left_over = divmod(total, data * degrees.micro)
    if left_over or not accumulation:
        return None
    parallelism = spec.parallelism.model_copy(
        update={
            "tensor": degrees.tensor,
            "pipeline": degrees.pipeline,
            "data": data,
            "zero_stage": degrees.zero_stage,
        }
    )
    training = spec.training.model_copy(
        update={
            "train_micro_batch_size_per_gpu": degrees.micro,
            "gradient_accumulation_steps": accumulation,
            "recompute": degrees.recompute,
        }
    )
    return spec.model_copy(update={"parallelism": parallelism, "training": training})


def _points(spec: JobSpec, fixed: Collection[str]) -> Iterator[Degrees]:
    """Everything that may be tried; what the checks refuse of it at any batch is left out."""
    training, per_node = spec.training, slots_per_node(spec)
    total, slots = training.train_batch_size, spec.num_nodes * per_node
    assert total is not None
    recomputes: Sequence[Recompute] = ("none", "full")
    if "recompute" in fixed:
        recomputes = (training.recompute,)
    for tensor in divisors(per_node):
        for pipeline in divisors(slots // tensor):
            if pipeline > spec.model.num_layers:
                continue
            data = slots // tensor // pipeline
            share, left_over = divmod(total, data)
            if left_over:
                continue
            micros = [n for n in divisors(share) if n <= MOST_SEQUENCES]
            if FIXED[0] in fixed:
                micros = [n for n in micros if n == training.train_micro_batch_size_per_gpu]
            if FIXED[1] in fixed:
                micros = [n for n in micros if share // n == training.gradient_accumulation_steps]
            # With one replica there is nothing that ZeRO divides.
            for zero_stage in (0, 1, 2) if data > 1 else (1,):
                points = [
                    Degrees(tensor, pipeline, zero_stage, micro, recompute)
                    for micro in micros
                    for recompute in recomputes
                ]
                first = varied(spec, points[0]) if points else None
                if first is not None and accepted(first):
                    yield from points


def divisors(number: int) -> list[int]:
    """From 1 to ``number``."""
    small = [n for n in range(1, int(number**0.5) + 1) if number % n == 0]
    return sorted({*small, *(number // n for n in small)})


def reasons(chosen: Choice, tried: Sequence[Choice]) -> list[str]:
    """A line for each degree: what the nearest other values of it would have cost at best."""
    lines = []
    for name, words in (
        ("tensor", "tensor"),
        ("pipeline", "pipeline"),
        ("zero_stage", "ZeRO"),
        ("micro", "micro-batch"),
        ("recompute", "recompute"),
    ):
        mine = getattr(chosen.degrees, name)
        # ``tried`` is in order, so the first of a value is its best.
        best: dict[Any, Choice] = {}
        for choice in tried:
            best.setdefault(getattr(choice.degrees, name), choice)
        others = [value for value in best if value != mine]
        if name == "recompute":
            near = others
        else:
            below = [v for v in others if v < mine]
            above = [v for v in others if v > mine]
            near = [*sorted(below)[-1:], *sorted(above)[:1]]
        if near:
            told = "; ".join(f"{value} {_than(best[value], chosen)}" for value in near)
            lines.append(f"{words} {mine}: {told}")
    return lines


def _than(other: Choice, chosen: Choice) -> str:
    """How the best of another value compares."""
    found = other.estimate
    if not found.fits_device:
        need, room = found.device_bytes / 1e9, found.device_room / 1e9
        return f"needs {need:.0f} GB of {room:.0f} at least"
    if not found.fits_host:
        need, room = found.host_bytes / 1e9, found.host_room / 1e9
        return f"needs {need:.0f} GB of {room:.0f} of its nodes' memory"
    slower = found.step.total / chosen.estimate.step.total - 1
    return "is as fast" if slower < 0.001 else f"is {slower:.1%} slower at best"
