"""How ranks meet, and the one small agreement they reach each step.

Promises: a rank that never comes is an error within ``JOIN_TIMEOUT_S``, naming the address;
what ranks agree on is the same on all of them, or they stop.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from launch.commands import Assignment

JOIN_TIMEOUT_S = 60.0
COLLECTIVE_TIMEOUT_S = 1800.0
"""A last resort: the supervisor ends a rank that hangs long before."""


class JoinError(RuntimeError):
    """Not all ranks met at the attempt's address in time."""


class RanksDisagreeError(RuntimeError):
    """Ranks that must be in the same state are not; going on would train on nonsense."""


def rank_environment(assignment: Assignment) -> dict[str, str]:
    """The environment that torch.distributed and DeepSpeed read."""
    return {
        "RANK": str(assignment.rank),
        "WORLD_SIZE": str(assignment.world_size),
        "LOCAL_RANK": str(assignment.local_rank),
        "LOCAL_SIZE": str(assignment.local_size),
        "MASTER_ADDR": assignment.master_addr,
        "MASTER_PORT": str(assignment.master_port),
    }


def join(assignment: Assignment) -> dist.ProcessGroup:
    """Make the default process group; returns a gloo group of all ranks for small words.

    gloo on CPU, NCCL with the device of ``local_rank`` on GPU. Raises JoinError.
    """
    os.environ.update(rank_environment(assignment))
    on_gpu = torch.cuda.is_available()
    if on_gpu:
        torch.cuda.set_device(assignment.local_rank)
    try:
        store = dist.TCPStore(
            assignment.master_addr,
            assignment.master_port,
            assignment.world_size,
            is_master=assignment.rank == 0,
            timeout=timedelta(seconds=JOIN_TIMEOUT_S),
            wait_for_workers=True,
        )
    except (dist.DistError, RuntimeError) as error:
        address = f"{assignment.master_addr}:{assignment.master_port}"
        raise JoinError(
            f"rank {assignment.rank}: not all {assignment.world_size} ranks met at {address} "
            f"within {JOIN_TIMEOUT_S:g} s: {error}"
        ) from error
    timeout = timedelta(seconds=COLLECTIVE_TIMEOUT_S)
    dist.init_process_group(
        "nccl" if on_gpu else "gloo",
        store=store,
        rank=assignment.rank,
        world_size=assignment.world_size,
        timeout=timeout,
    )
    if on_gpu:
        return dist.new_group(backend="gloo", timeout=timeout)
    world = dist.group.WORLD
    assert world is not None
    return world


@dataclass(frozen=True, slots=True)
class Agreed:
    """What all ranks know at the end of a step."""

    command: int
    """Number of the newest command that rank 0 has seen."""
    behind: bool
    """Some rank's copy for a partner node is still on its way."""
    writing: bool = False
    """Some rank's checkpoint file is still being written."""


def agree(
    group: dist.ProcessGroup,
    command: int,
    step: int,
    skipped: bool,
    behind: bool = False,
    writing: bool = False,
) -> Agreed:
    """What rank 0 has been told to do, and whether any rank's copies are ``behind`` or ``writing``.

    The others' ``command`` is not looked at. One all-reduce of a few integers, in which
    ranks also show each other that they did the same: RanksDisagreeError when the steps
    or the decision to leave the update out differ.
    """
    mine = command if dist.get_rank(group) == 0 else 0
    told = [mine, step, -step, skipped, -int(skipped), behind, writing]
    words = torch.tensor(told, dtype=torch.int64)
    dist.all_reduce(words, op=dist.ReduceOp.MAX, group=group)
    agreed, last, first, some_skipped, none_skipped, some_behind, some_write = words.tolist()
    if last != -first:
        raise RanksDisagreeError(f"some ranks ended step {-first}, others step {last}")
    if some_skipped != -none_skipped:
        raise RanksDisagreeError(f"only some ranks left out the update of step {step}")
    return Agreed(int(agreed), bool(some_behind), bool(some_write))


def require_same(group: dist.ProcessGroup, value: int, what: str) -> None:
    """Raise RanksDisagreeError unless all ranks hold the same ``value`` (an int64)."""
    words = torch.tensor([value, -value], dtype=torch.int64)
    dist.all_reduce(words, op=dist.ReduceOp.MAX, group=group)
    high, low = words.tolist()
    if high != -low:
        raise RanksDisagreeError(f"{what} is not the same on all ranks")


def meet(group: dist.ProcessGroup) -> None:
    """Wait until all ranks have come here."""
    dist.barrier(group)


Word = TypeVar("Word")


def gather(group: dist.ProcessGroup, word: Word) -> list[Word]:
    """Every rank's ``word``, in order of ranks, on every rank; it is pickled."""
    words: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(words, word, group=group)
    return words
