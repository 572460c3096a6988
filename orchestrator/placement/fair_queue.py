"""Who is next for nodes, and who makes room. Pure.

Promises: a job of higher priority comes before every one of lower; among equals users take turns,
however many jobs one of them submits; a user's own jobs keep their order. Nothing is preempted for
an equal, or where it would not be enough; no more is preempted than is needed, the least important
and the youngest first.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import TypeVar

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class Ticket:
    """A job that waits, or one that holds nodes."""

    job: str
    user: str
    priority: int
    since: float
    """Waiting: when it was submitted; holding: when it was given its nodes."""
    slots: int = 0
    """Slots that it takes or holds."""
    preemptible: bool = True


def in_order(
    waiting: Sequence[Ticket], holding: Sequence[Ticket], served_at: Mapping[str, float]
) -> list[Ticket]:
    """The order in which ``waiting`` are given nodes: all of ``turns``."""
    return list(turns(waiting, holding, served_at))


def turns(
    waiting: Iterable[Ticket], holding: Iterable[Ticket], served_at: Mapping[str, float]
) -> Iterator[Ticket]:
    """One after the other those who are given nodes, as far as anybody asks.

    Within a priority the next one is the user's who has the fewest slots, counting those that
    come before in this order; of equal ones who was served longest ago, then whose job is oldest.
    ``served_at``: when each user was given nodes last.
    """
    held: dict[str, int] = {}
    for ticket in holding:
        held[ticket.user] = held.get(ticket.user, 0) + ticket.slots
    served = dict(served_at)
    newest = max(served.values(), default=0.0)
    lines: dict[int, dict[str, deque[Ticket]]] = {}
    for ticket in sorted(waiting, key=attrgetter("since", "job")):
        lines.setdefault(ticket.priority, {}).setdefault(ticket.user, deque()).append(ticket)
    for priority in sorted(lines, reverse=True):
        mine = lines[priority]

        def place(user: str, line: deque[Ticket]) -> tuple[int, float, float, str, str]:
            first = line[0]
            return (held.get(user, 0), served.get(user, 0.0), first.since, first.job, user)

        # Only who has had a turn moves: everybody else's place stays.
        heap = [place(user, line) for user, line in mine.items()]
        heapq.heapify(heap)
        while heap:
            user = heapq.heappop(heap)[-1]
            ticket = mine[user].popleft()
            held[user] = held.get(user, 0) + max(ticket.slots, 1)
            newest = served[user] = newest + 1.0
            if mine[user]:
                heapq.heappush(heap, place(user, mine[user]))
            yield ticket


def first(
    waiting: Iterable[Ticket],
    holding: Iterable[Ticket],
    served_at: Mapping[str, float],
    could_fit: Callable[[Ticket], bool],
) -> Ticket | None:
    """Who of ``waiting`` is given nodes before all others; who could not have them, though nothing
    else ran, holds up nobody and takes no turn of its user's."""
    return next(turns(filter(could_fit, waiting), holding, served_at), None)


def victims(
    ticket: Ticket,
    holding: Sequence[Ticket],
    fits_without: Callable[[frozenset[str]], bool],
) -> list[Ticket]:
    """The jobs to preempt so that ``ticket`` fits; empty where that would not be enough.

    ``fits_without(jobs)``: whether it would fit once those jobs had given their nodes back.
    """
    lower = [h for h in holding if h.priority < ticket.priority and h.preemptible]
    lower.sort(key=lambda h: (h.priority, -h.since, h.job))
    return fewest(lower, lambda chosen: fits_without(_ids(chosen)))


def fewest(candidates: Sequence[_T], enough: Callable[[Sequence[_T]], bool]) -> list[_T]:
    """The first of ``candidates`` that together are enough, and no more of them than that takes;
    empty where not even all of them would be, or none is needed."""
    if not enough(candidates):
        return []
    chosen: list[_T] = []
    for candidate in candidates:
        if enough(chosen):
            break
        chosen.append(candidate)
    # What was taken early may have become superfluous; the most important are spared first.
    for candidate in reversed(chosen[:]):
        rest = [c for c in chosen if c is not candidate]
        if rest and enough(rest):
            chosen = rest
    return chosen


def _ids(tickets: Sequence[Ticket]) -> frozenset[str]:
    return frozenset(ticket.job for ticket in tickets)
