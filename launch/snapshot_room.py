"""How many snapshots ranks hold in their own memory, by what their nodes have free.

Promises: ranks meet here and come to the same answer; neither the copy that a state was restored
from, which is gone by now, nor anything else that a rank has let go of counts as taken; a job that
has trained was accepted, and keeps fewer rather than end.
"""

from __future__ import annotations

import logging

import torch.distributed as dist

from launch.allocator import give_back_freed_memory
from launch.commands import Assignment, RestorePoint
from launch.node_memory import free_bytes
from launch.process_group import gather
from launch.replicas import RankState, most_in_rings, refuse_too_large

logger = logging.getLogger(__name__)


def kept_in_rings(
    assignment: Assignment,
    world: dist.ProcessGroup,
    nbytes: int,
    held_nbytes: int,
    started_from: RestorePoint | None,
) -> int:
    """Snapshots of ``nbytes`` that every rank's ring may keep: ``snapshots.keep``, as a rule.

    ``held_nbytes``: what the node's keeper takes already. Raises SnapshotMemoryError where some
    node has no memory for them, and at a restart not even for the fewest.
    """
    snapshots = assignment.run.snapshots
    give_back_freed_memory()
    # A rank that has not let go of its copy yet takes room on its node from the others.
    dist.barrier(world)
    room = free_bytes() + held_nbytes
    if started_from is not None and started_from.tier != "disk":
        # The copy came by way of the object store, which keeps that memory for the next one.
        room += nbytes
    mine = RankState(assignment.rank - assignment.local_rank, nbytes, room)
    states = gather(world, mine)
    keep, replicas = snapshots.keep, snapshots.replicas or 0
    if assignment.attempt > 1 and started_from is not None:
        keep = most_in_rings(states, keep, replicas)
        if keep < snapshots.keep:
            told = "there is room for %d of snapshots.keep: %d in the ranks"
            logger.warning(told, keep, snapshots.keep)
    else:
        refuse_too_large(states, keep, replicas)
    return keep
