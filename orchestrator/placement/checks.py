"""What preflight came to on a job's nodes, attempt by attempt. Pure.

Promises: a node counts as one that passed a check only where it was tried; a node with which the
links of one node after another fail is at fault, and not they.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from launch.preflight import OF_LINKS, Check, Failure


@dataclass(frozen=True, slots=True)
class Checked:
    """What preflight came to in an attempt."""

    attempt: int
    time: float
    nodes: tuple[str, ...]
    """That have ranks, by Ray's id."""
    failed: Mapping[str, Failure]
    """Of these; none where the attempt trained."""
    far_ends: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """Of those that failed for a few of their links: the nodes at the other end."""

    def passed(self, check: Check) -> set[str]:
        """Nodes that came through ``check``. Links are tried once every node has passed alone."""
        of_links = any(failure.check in OF_LINKS for failure in self.failed.values())
        if check in OF_LINKS and self.failed and not of_links:
            return set()
        return set(self.nodes) - self.failed.keys()


@dataclass(frozen=True, slots=True)
class Laid:
    """To whom the failures of a job's last preflight are laid."""

    attempt: int
    time: float
    failed: Mapping[str, Failure]
    """By Ray's id."""
    cleared: frozenset[tuple[int, str]]
    """(attempt, node): those that preflight named for links whose other end is at fault."""


def laid(checks: Sequence[Checked]) -> Laid:
    """``checks`` are a job's, oldest first; where there are none, nothing is laid to anybody."""
    if not checks:
        return Laid(0, 0.0, {}, frozenset())
    named: dict[str, set[str]] = {}
    """For links with this node."""
    at_fault: set[str] = set()
    of_the_last: dict[str, Failure] = {}
    for one in checks:
        of_the_last = {}
        for node, ends in one.far_ends.items():
            for end in ends:
                if others := named.get(end, set()) - {node}:
                    why = one.failed[node].reason.partition(": ")[2]
                    count = len(others) + 1
                    told = f"{count} of its {count} links failed: with one node after the other"
                    of_the_last[end] = Failure(f"{told}: {why}", False, "links")
        # Or it is named itself, where all were new to each other.
        by_itself = {node for node, why in one.failed.items() if why.check in OF_LINKS}
        at_fault |= of_the_last.keys() | (by_itself & named.keys())
        for node, ends in one.far_ends.items():
            for end in ends:
                named.setdefault(end, set()).add(node)
    cleared = frozenset(
        (one.attempt, node)
        for one in checks
        for node, ends in one.far_ends.items()
        if at_fault >= set(ends)
    )
    last = checks[-1]
    stays = {n: why for n, why in last.failed.items() if (last.attempt, n) not in cleared}
    return Laid(last.attempt, last.time, {**stays, **of_the_last}, cleared)
