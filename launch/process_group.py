"""How ranks meet, and the one small agreement they reach each step.

Promises: a rank that never comes is an error within ``JOIN_TIMEOUT_S``, naming it and the address;
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
_ALL_HERE = "all ranks are here"
_MOST_TOLD = 16
"""Ranks that an error names in words."""


class JoinError(RuntimeError):
    """Not all ranks met at the attempt's address in time: the fault of who didn't come."""

    def __init__(self, message: str, absent: tuple[int, ...] = ()) -> None:
        """``absent``: ranks that didn't come, as far as this one knows."""
        super().__init__(message)
        self.absent = absent

    def __reduce__(self) -> tuple[type[JoinError], tuple[str, tuple[int, ...]]]:
        return (type(self), (str(self), self.absent))


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


def host_store(address: str) -> dist.TCPStore:
    """The store at which an attempt's ranks meet, in rank 0's process; listens once this returns,
    at a port that the system has chosen (``.port``).

    Ranks that come before the store listens would try again after 0.26 to 0.75 s, drawn by chance
    in torch's client, of a restart that takes one second; and a port that was free a moment ago
    may be another process' by then.
    """
    timeout = timedelta(seconds=JOIN_TIMEOUT_S)
    return dist.TCPStore(address, 0, is_master=True, timeout=timeout, wait_for_workers=False)


def join(assignment: Assignment, hosted: dist.TCPStore | None = None) -> dist.ProcessGroup:
    """Make the default process group; returns a gloo group of all ranks for small words.

    gloo on CPU, NCCL with the device of ``local_rank`` on GPU. ``hosted``: what this process has
    from ``host_store``, taken if it is the assignment's; without it rank 0 opens one at that port.
    Raises JoinError.
    """
    os.environ.update(rank_environment(assignment))
    on_gpu = torch.cuda.is_available()
    if on_gpu:
        torch.cuda.set_device(assignment.local_rank)
    store = _met(assignment, hosted)
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


def _met(assignment: Assignment, hosted: dist.TCPStore | None) -> dist.TCPStore:
    """The store at the attempt's address, once every rank has come there."""
    rank, world_size = assignment.rank, assignment.world_size
    if hosted is not None and (rank != 0 or hosted.port != assignment.master_port):
        # Of a supervisor that has gone, before it gave ranks out; this one has drawn others.
        hosted = None
    address = f"{assignment.master_addr}:{assignment.master_port}"
    within = f"within {JOIN_TIMEOUT_S:g} s"
    timeout = timedelta(seconds=JOIN_TIMEOUT_S)
    try:
        # Waiting for workers, it would only count those that came.
        store = hosted or dist.TCPStore(
            assignment.master_addr,
            assignment.master_port,
            world_size,
            is_master=rank == 0,
            timeout=timeout,
            wait_for_workers=False,
        )
    except (dist.DistError, RuntimeError) as error:
        why = str(error).splitlines()[0]
        if rank == 0:
            raise JoinError(f"nothing can be opened at {address}: {why}", (0,)) from error
        raise JoinError(f"rank 0 was not reached at {address} {within}: {why}", (0,)) from error
    came = [f"rank {other} is here" for other in range(world_size)]
    try:
        store.set(came[rank], "")
        if rank == 0:
            store.wait(came, timeout)
            store.set(_ALL_HERE, "")
        else:
            store.wait([_ALL_HERE], timeout)
    except (dist.DistError, RuntimeError) as error:
        if rank:
            why = str(error).splitlines()[0]
            raise JoinError(f"rank 0 at {address} did not say that all came: {why}") from error
        absent = tuple(other for other in range(world_size) if not store.check([came[other]]))
        who = ", ".join(map(str, absent[:_MOST_TOLD])) + ", …" * (len(absent) > _MOST_TOLD)
        told = f"rank{'s' * (len(absent) > 1)} {who} did not come to {address} {within}"
        raise JoinError(f"{told}, of {world_size} ranks", absent) from error
    return store


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


Word = TypeVar("Word")


def gather(group: dist.ProcessGroup, word: Word) -> list[Word]:
    """Every rank's ``word``, in order of ranks, on every rank; it is pickled."""
    words: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(words, word, group=group)
    return words
