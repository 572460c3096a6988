"""The process groups of one rank that DeepSpeed's grid doesn't make, or makes too late.

Promises: every rank of the world calls ``build_groups`` once, before the model is built (its
linears need their tensor group); a rank makes its own groups only.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch.distributed as dist

from parallel.config import ParallelismConfig
from parallel.tensor import TensorGroup
from parallel.topology import Coordinate, coordinates, stage_ranks, tensor_ranks


@dataclass(frozen=True, slots=True)
class RankGroups:
    """Where a rank stands, and with whom it shares what."""

    coordinate: Coordinate
    tensor: TensorGroup | None
    """Ranks that share its matrices; None when it has them whole."""
    stage: dist.ProcessGroup | None
    """The tensor × data ranks of its stage, which see the same linears; None when alone."""


def build_groups(degrees: ParallelismConfig) -> RankGroups:
    """Groups of this rank; ``degrees.data`` must be set and the process group exist."""
    rank = dist.get_rank()
    coordinate = coordinates(rank, degrees)
    sharing = tensor_ranks(coordinate, degrees)
    shards = _group(sharing)
    tensor = None if shards is None else TensorGroup(shards, coordinate.tensor, len(sharing))
    of_stage = stage_ranks(coordinate, degrees)
    stage = shards if of_stage == sharing else _group(of_stage)
    return RankGroups(coordinate, tensor, stage)


def _group(ranks: Sequence[int]) -> dist.ProcessGroup | None:
    if len(ranks) == 1:
        return None
    return dist.new_group(list(ranks), use_local_synchronization=True)
