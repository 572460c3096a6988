"""Who is next for nodes, and who makes room. Pure.

Promises: a job of higher priority comes before every one of lower; among equals users take turns,
however many jobs one of them submits; a user's own jobs keep their order. Nothing is preempted for
an equal, or where it would not be enough; no more is preempted than is needed, the least important
and the youngest first.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass


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
    """The order in which ``waiting`` are given nodes.

    Within a priority the next one is the user's who has the fewest slots, counting those that
    come before in this order; of equal ones who was served longest ago, then whose job is oldest.
    ``served_at``: when each user was given nodes last.
    """
    held: dict[str, int] = {}
    for ticket in holding:
        held[ticket.user] = held.get(ticket.user, 0) + ticket.slots
    served = dict(served_at)
    newest = max(served.values(), default=0.0)
    ordered: list[Ticket] = []
    for priority in sorted({t.priority for t in waiting}, reverse=True):
        lines: dict[str, list[Ticket]] = {}
        for ticket in sorted(waiting, key=lambda t: (t.since, t.job)):
            if ticket.priority == priority:
                lines.setdefault(ticket.user, []).append(ticket)
        while lines:
            user = min(
                lines,
                key=lambda u: (
                    held.get(u, 0),
                    served.get(u, 0.0),
                    lines[u][0].since,
                    lines[u][0].job,
                ),
            )
            ticket = lines[user].pop(0)
            if not lines[user]:
                del lines[user]
            ordered.append(ticket)
            held[user] = held.get(user, 0) + max(ticket.slots, 1)
            newest = served[user] = newest + 1.0
    return ordered


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
    chosen: list[Ticket] = []
    for candidate in lower:
        if fits_without(_ids(chosen)):
            break
        chosen.append(candidate)
    if not chosen or not fits_without(_ids(chosen)):
        return []
    # What was taken early may have become superfluous; the most important are spared first.
    for candidate in reversed(chosen[:]):
        rest = [c for c in chosen if c is not candidate]
        if rest and fits_without(_ids(rest)):
            chosen = rest
    return chosen


def _ids(tickets: Sequence[Ticket]) -> frozenset[str]:
    return frozenset(ticket.job for ticket in tickets)
