"""Which nodes hold copies of which nodes' snapshots, and whether that fits in their memory. Pure.

Promises: a node's partners are other nodes of the group, the next ones in the order of ranks, so
that with one replica the loss of any one node leaves a copy of every rank, and each node holds
as many copies for others as others hold for it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from launch.keeper import most_held

LEAST_KEPT = 2
"""Snapshots without which a rank has none to go back to while it makes one."""


def partners(place: int, nodes: int, replicas: int) -> tuple[int, ...]:
    """Which nodes hold copies of node ``place``'s snapshots; fewer where there are no others."""
    return tuple((place + n) % nodes for n in range(1, min(replicas, nodes - 1) + 1))


class SnapshotMemoryError(ValueError):
    """The snapshots don't fit into a node's memory; the message names the keys to change."""


@dataclass(frozen=True, slots=True)
class RankState:
    """What one rank tells of its state and of its node, before it makes room for snapshots."""

    node: int
    """Its node's first rank."""
    nbytes: int
    """Size of one snapshot."""
    room: int
    """Memory of its node that is free or holds snapshots already, in bytes."""


def memory_needed(states: Sequence[RankState], node: int, keep: int, replicas: int) -> int:
    """Bytes that all snapshots on ``node`` take at most.

    A rank's own: ``keep`` + 1 in its ring, what a keeper holds of a rank, and one in the object
    store while it is on its way. A copy for another node: what a keeper holds, and one on its way.
    """
    of_node = _by_node(states)
    nodes = list(of_node)
    place = nodes.index(node)
    copied = [other for i, other in enumerate(nodes) if place in partners(i, len(nodes), replicas)]
    held = most_held(keep) if replicas and len(nodes) > 1 else keep
    own = of_node[node] * (keep + 1 + held + 1)
    return own + sum(of_node[other] * (held + 1) for other in copied)


def _by_node(states: Sequence[RankState]) -> dict[int, int]:
    """Bytes of one snapshot of all of a node's ranks; nodes in order."""
    found = dict.fromkeys(sorted({state.node for state in states}), 0)
    for state in states:
        found[state.node] += state.nbytes
    return found


def most_in_rings(states: Sequence[RankState], keep: int, replicas: int) -> int:
    """Snapshots that ranks can hold in their own memory, ``keep`` at most, where keepers hold as
    many as ever. Raises SnapshotMemoryError where a node has no memory for ``LEAST_KEPT``.

    The same on every rank, for all are given the same ``states``, in order of ranks.
    """
    most = keep
    for node, nbytes in _by_node(states).items():
        room = min(state.room for state in states if state.node == node)
        over = memory_needed(states, node, keep, replicas) - room
        if over > 0 and nbytes:
            most = min(most, keep - -(-over // nbytes))
    if most < LEAST_KEPT:
        refuse_too_large(states, keep, replicas)
    return most


def refuse_too_large(states: Sequence[RankState], keep: int, replicas: int) -> None:
    """Raise SnapshotMemoryError where a node's snapshots don't fit into its memory.

    The same on every rank, for all are given the same ``states``, in order of ranks.
    """
    for node in sorted({state.node for state in states}):
        ranks = [rank for rank, state in enumerate(states) if state.node == node]
        room = min(state.room for state in states if state.node == node)
        needed = memory_needed(states, node, keep, replicas)
        if needed <= room:
            continue
        choices = [(keep - 1, replicas), (LEAST_KEPT, replicas), (keep, 0), (LEAST_KEPT, 0)]
        remedies = {
            _keys(keep, replicas, choice): memory_needed(states, node, *choice)
            for choice in choices
            if choice[0] >= LEAST_KEPT
        }
        fitting = [
            (words, size) for words, size in remedies.items() if size <= min(room, needed - 1)
        ]
        told = [f"{words} ({_gb(size)})" for words, size in fitting[:2]]
        remedy = (
            f"write {' or '.join(told)}"
            if told
            else "spread the ranks over more nodes, or raise parallelism.zero_stage, "
            "parallelism.tensor or parallelism.pipeline: even the least of them don't fit"
        )
        raise SnapshotMemoryError(
            f"snapshots.keep: {keep} with snapshots.replicas: {replicas} takes {_gb(needed)} on "
            f"the node of ranks {ranks[0]}-{ranks[-1]}, whose states are "
            f"{_gb(sum(states[r].nbytes for r in ranks))}, and {_gb(room)} are free there: {remedy}"
        )


def _keys(keep: int, replicas: int, choice: tuple[int, int]) -> str:
    """What to write for ``choice``, of what differs."""
    changed = [f"keep: {choice[0]}"] * (choice[0] != keep)
    changed += [f"replicas: {choice[1]}"] * (choice[1] != replicas)
    return f"snapshots: {{{', '.join(changed)}}}"


def _gb(nbytes: int) -> str:
    return f"{nbytes / 1e9:.3g} GB"
