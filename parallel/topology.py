"""Where a rank stands: its coordinate on the pipe × data × tensor grid, and what a stage holds.

Promises: everything here is arithmetic and needs neither torch nor a process group, so that
the controller can say which ranks share what before there are any. The order of the axes is
DeepSpeed's ``PipeModelDataParallelTopology`` (pipe outermost, tensor innermost):
``rank = (pipe · data_size + data) · tensor_size + tensor``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from parallel.config import ParallelismConfig


@dataclass(frozen=True, slots=True)
class Coordinate:
    """Place of one rank; each number counts from 0."""

    pipe: int
    """Stage: which consecutive layers."""
    data: int
    """Replica: which part of the batch."""
    tensor: int
    """Which part of every matrix."""


def data_size(world_size: int, parallelism: ParallelismConfig) -> int:
    """Replicas that ``world_size`` ranks make.

    Raises ValueError when the degrees don't multiply to ``world_size``.
    """
    one_replica = parallelism.pipeline * parallelism.tensor
    replicas, left_over = divmod(world_size, one_replica)
    if left_over or replicas == 0 or parallelism.data not in (None, replicas):
        raise ValueError(
            f"{world_size} ranks are not pipeline {parallelism.pipeline} × "
            f"data {parallelism.data or 'any'} × tensor {parallelism.tensor}"
        )
    return replicas


def coordinates(rank: int, parallelism: ParallelismConfig) -> Coordinate:
    """Coordinate of ``rank``; ``parallelism.data`` must be set.

    Raises ValueError for a rank outside the grid.
    """
    replicas = _replicas(parallelism)
    if not 0 <= rank < parallelism.pipeline * replicas * parallelism.tensor:
        raise ValueError(f"rank {rank} is outside the grid of {parallelism!r}")
    rest, tensor = divmod(rank, parallelism.tensor)
    pipe, data = divmod(rest, replicas)
    return Coordinate(pipe=pipe, data=data, tensor=tensor)


def rank_at(coordinate: Coordinate, parallelism: ParallelismConfig) -> int:
    """Rank that stands at ``coordinate``; the inverse of ``coordinates``."""
    replicas = _replicas(parallelism)
    inside = (
        0 <= coordinate.pipe < parallelism.pipeline
        and 0 <= coordinate.data < replicas
        and 0 <= coordinate.tensor < parallelism.tensor
    )
    if not inside:
        raise ValueError(f"{coordinate} is outside the grid of {parallelism!r}")
    stage_row = coordinate.pipe * replicas + coordinate.data
    return stage_row * parallelism.tensor + coordinate.tensor


def tensor_ranks(coordinate: Coordinate, parallelism: ParallelismConfig) -> tuple[int, ...]:
    """The ranks that share this coordinate's matrices, in order of shards: neighbours."""
    return tuple(
        rank_at(Coordinate(coordinate.pipe, coordinate.data, tensor), parallelism)
        for tensor in range(parallelism.tensor)
    )


def stage_ranks(coordinate: Coordinate, parallelism: ParallelismConfig) -> tuple[int, ...]:
    """All data × tensor ranks of this coordinate's stage, in order of ranks."""
    return tuple(
        rank_at(Coordinate(coordinate.pipe, data, tensor), parallelism)
        for data in range(_replicas(parallelism))
        for tensor in range(parallelism.tensor)
    )


def stage_boundaries(costs: Sequence[float], required: Sequence[bool], stages: int) -> list[int]:
    """Cut layers into consecutive stages so that the most expensive stage is cheapest.

    ``costs`` has one number a layer, in any one unit; every stage gets at least one layer
    that is ``required`` (a transformer layer: a stage of an embedding alone would have no
    linears to watch and almost nothing to do). Returns ``stages + 1`` indices, the first 0
    and the last ``len(costs)``: stage s holds layers [b[s], b[s + 1]). The answer
    follows from the arguments alone, so every rank finds the same.
    Raises ValueError when there are fewer required layers than stages.
    """
    if sum(required) < stages:
        raise ValueError(f"{sum(required)} transformer layers cannot fill {stages} stages")
    num_layers = len(costs)
    most = _evenly(costs, required, stages)
    # best[stop]: (cost of the most expensive stage, boundaries) of layers [0, stop) in s stages.
    best: dict[int, tuple[float, list[int]]] = {0: (0.0, [0])}
    for _ in range(stages):
        extended: dict[int, tuple[float, list[int]]] = {}
        for start, (worst, cuts) in best.items():
            cost, has_required = 0.0, False
            for stop in range(start + 1, num_layers + 1):
                cost += costs[stop - 1]
                if cost > most:
                    break  # an even cut does better, whatever comes before and after
                has_required = has_required or required[stop - 1]
                candidate = (max(worst, cost), [*cuts, stop])
                if has_required and (stop not in extended or candidate < extended[stop]):
                    extended[stop] = candidate
        best = extended
    return best[num_layers][1]


def _evenly(costs: Sequence[float], required: Sequence[bool], stages: int) -> float:
    """Cost of the most expensive of stages with equally many required layers; the best is less.

    With a margin for sums in another order.
    """
    each = [0.0] * stages
    seen = 0
    for cost, counts in zip(costs, required, strict=True):
        seen += counts
        each[max(0, seen - 1) * stages // sum(required)] += cost
    return max(each) * (1 + 1e-9)


def _replicas(parallelism: ParallelismConfig) -> int:
    if parallelism.data is None:
        raise ValueError("the data-parallel degree is not set; complete the spec first")
    return parallelism.data
