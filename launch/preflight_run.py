"""Preflight over a group's nodes, without waiting for them: started, and asked for its verdict.

Each node is probed by itself, then they meet in pairs, in rounds in which all begin at once: where
each went through its own list, whoever had waited for a dead node came late to the next, and was
told as dead there. Promises: nothing here blocks; a node that hasn't answered a probe when the time
is over, or a meeting after ``MEETING_S``, has failed; one that was not met for want of time has
not, nor has a link that works when it is tried again; a dead node costs two rounds; the worker that
is asked is one of the job's own.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from launch.preflight import (
    Answer,
    Demand,
    Failure,
    Limits,
    Link,
    Verdict,
    apart,
    blame,
    far_ends,
    judge,
    rounds,
)
from launch.preflight_probes import Meeting, meet, probe_node
from launch.rank_group import Seat

logger = logging.getLogger(__name__)

LINK_TIMEOUT_S = 5.0
"""Seconds that two nodes may take to find each other, and that a collective may."""
MEETING_S = 15.0
"""Seconds that a node may take to say what came of a meeting."""
LEAST_ROUNDS = 3
"""Made even when the time is over: of three nodes, two tell which one is at fault."""
GIVEN_UP_AFTER = 2
"""Meetings with nodes of which other links work that fail, without one that works, after which a
node is met no more."""
ROUNDS_AGAIN = 2
"""Of meetings that failed between nodes of which other links work."""

Asked = tuple[int, str]
"""Round, 0 for the probes, and node."""


@dataclass(frozen=True, slots=True)
class _Awaited:
    """A node's word on a meeting."""

    round: int
    other: int
    """Place of whom it meets."""
    reference: Any


class PreflightRun:
    """One check of ``seats``; only links with one of ``newcomers`` (node ids) are tried."""

    def __init__(
        self,
        seats: Sequence[Seat],
        workers: Mapping[str, Any],
        newcomers: Collection[str],
        demand: Demand,
        limits: Limits,
        *,
        now: float,
        timeout_s: float,
        on_change: Callable[[], None] = lambda: None,
        clock: Callable[[], float],
    ) -> None:
        """``workers``: an actor a node, by node id, with ``call`` (``launch.worker.Worker``)."""
        self._seats = list(seats)
        self._workers = workers
        self._newcomers = set(newcomers)
        self._demand = demand
        self._limits = limits
        self._began = now
        self._deadline = now + timeout_s
        self._on_change = on_change
        self._clock = clock
        self._answered: dict[Asked, float] = {}
        self._answers: dict[str, Answer] = {}
        self._failed: dict[str, Failure] = {}
        self._round = 0
        self._to_come: list[list[tuple[int, int]]] = []
        """Rounds of meetings."""
        self._awaited: dict[int, _Awaited] = {}
        """By place, what hasn't been answered."""
        self._tried_again = False
        self._round_ends = 0.0
        self._links: list[Link] = []
        self._far_ends: dict[str, tuple[str, ...]] = {}
        fresh = [seat for seat in self._seats if seat.node_id in self._newcomers]
        self._probes = {
            seat.node_id: self._ask(seat.node_id, probe_node, demand, seat.node_ip)
            for seat in fresh
        }

    def verdict(self, now: float) -> Verdict | None:
        """What it came to; None while it is under way."""
        if self._round == 0:
            late = now > self._deadline
            if not self._gather() and not late:
                return None
            self._judge(late)
            if self._failed:
                return self._verdict(now)
            self._order()
        elif not self._met(now):
            return None
        if self._meet(now):
            return None
        self._lay_blame()
        return self._verdict(now)

    def _gather(self) -> bool:
        """Take in probes that are done; whether all are."""
        for node_id in [n for n in self._probes if (0, n) in self._answered]:
            value, error = _result(self._probes.pop(node_id))
            if error:
                self._failed[node_id] = Failure(f"the probe failed: {error}", False, "probe")
            else:
                self._answers[node_id] = Answer(value, self._began, self._answered[0, node_id])
        return not self._probes

    def _judge(self, late: bool) -> None:
        if late:
            waited = f"no answer for {self._deadline - self._began:.0f} s (preflight.timeout_s)"
            self._failed |= {node: Failure(waited, False, "answer") for node in self._probes}
        for node_id, answer in self._answers.items():
            failure = judge(answer, self._demand.of(node_id), self._limits)
            if failure is not None:
                self._failed[node_id] = failure

    def _order(self) -> None:
        """Newcomers come first: only those have told of a port, and host the others."""
        self._seats = sorted(self._seats, key=lambda s: s.node_id not in self._newcomers)
        self._to_come = rounds(len(self._seats))

    def _meet(self, now: float) -> bool:
        """Begin the next round in which anybody meets; False when there is none to be made."""
        while True:
            late = now > self._deadline and self._round >= LEAST_ROUNDS
            if not self._tried_again and (late or not self._to_come):
                self._try_again()
            if not self._to_come:
                return False
            self._round += 1
            out = self._out()
            for pair in self._to_come.pop(0):
                host = self._seats[pair[0]]
                if host.node_id in self._newcomers and out.isdisjoint(pair):
                    # What comes of it stands in place of what came of it before.
                    self._links = [x for x in self._links if {x.one, x.other} != {*pair}]
                    for place in pair:
                        self._ask_to_meet(pair, place)
            if self._under_way():
                self._round_ends = now + MEETING_S
                return True

    def _try_again(self) -> None:
        """The last rounds: what failed between nodes of which other links work may be a moment's
        trouble, and would keep a node from all jobs."""
        self._tried_again = True
        out = self._out()
        failed = {tuple(sorted((link.one, link.other))) for link in self._links if link.error}
        again = [(one, other) for one, other in failed if out.isdisjoint((one, other))]
        self._to_come = apart(again, ROUNDS_AGAIN)

    def _ask_to_meet(self, pair: tuple[int, int], place: int) -> None:
        host, seat = self._seats[pair[0]], self._seats[place]
        meeting = Meeting(
            pair=pair,
            place=place,
            address=host.node_ip,
            port=self._answers[host.node_id].probe.port,
            here=seat.node_ip,
            timeout_s=LINK_TIMEOUT_S,
            on_gpu=self._demand.on_gpu,
        )
        (other,) = {*pair} - {place}
        asked = self._ask(seat.node_id, meet, meeting)
        self._awaited[place] = _Awaited(self._round, other, asked)

    def _met(self, now: float) -> bool:
        """Take in what came of meetings, late ones of rounds before too; whether the round is
        over."""
        for place, awaited in list(self._awaited.items()):
            node_id = self._seats[place].node_id
            if (awaited.round, node_id) not in self._answered:
                continue
            del self._awaited[place]
            link, error = _result(awaited.reference)
            if error:
                why = f"its links could not be tried: {error}"
                self._failed[node_id] = Failure(why, False, "meeting")
            else:
                self._links.append(link)
        return not self._under_way() or now > self._round_ends

    def _under_way(self) -> bool:
        """Whether anybody still has to answer of this round."""
        return any(awaited.round == self._round for awaited in self._awaited.values())

    def _out(self) -> set[int]:
        """Places that are met no more: they don't answer, or none of their links works."""
        works = {link.one for link in self._links if not link.error}
        # With a node that is no better off it may be the other's fault.
        failing = Counter(x.one for x in self._links if x.error and x.other in works)
        dead = {p for p, count in failing.items() if count >= GIVEN_UP_AFTER and p not in works}
        gone = {p for p, seat in enumerate(self._seats) if seat.node_id in self._failed}
        return dead | gone | set(self._awaited)

    def _lay_blame(self) -> None:
        told = f"no answer for {MEETING_S:.0f} s while its links were tried"
        for place, awaited in self._awaited.items():
            partner = self._awaited.get(awaited.other)
            if partner is not None and partner.round == awaited.round:
                # Neither came back: one may have held up the other.
                self._links.append(Link(place, awaited.other, 0.0, told))
            else:
                self._failed[self._seats[place].node_id] = Failure(told, False, "meeting")
        gone = {p for p, seat in enumerate(self._seats) if seat.node_id in self._failed}
        links = [link for link in self._links if gone.isdisjoint((link.one, link.other))]
        newcomers = [i for i, s in enumerate(self._seats) if s.node_id in self._newcomers]
        named = blame(links, newcomers, self._limits)
        self._failed |= {self._seats[place].node_id: failure for place, failure in named.items()}
        self._far_ends = {
            self._seats[place].node_id: tuple(self._seats[end].node_id for end in ends)
            for place, ends in far_ends(links, named, self._limits).items()
        }

    def _verdict(self, now: float) -> Verdict:
        speeds = [link.mbit_s for link in self._links if not link.error]
        devices = {answer.probe.device for answer in self._answers.values()}
        return Verdict(
            failed=dict(self._failed),
            seconds=now - self._began,
            nodes=len(self._seats),
            slowest_mbit_s=min(speeds, default=None),
            device=", ".join(sorted(devices)),
            far_ends=self._far_ends,
        )

    def _ask(self, node_id: str, function: Callable[..., Any], *arguments: Any) -> Any:
        reference = self._workers[node_id].call.remote(function, *arguments)
        asked = (self._round, node_id)

        def settled(_: object) -> None:
            self._answered[asked] = self._clock()
            self._on_change()

        reference.future().add_done_callback(settled)
        return reference


def _result(reference: Any) -> tuple[Any, str]:
    """(what it gave, why it gave nothing)."""
    import ray

    try:
        return ray.get(reference, timeout=1.0), ""
    except ray.exceptions.RayError as error:
        lines = str(error).strip().splitlines()
        return None, f"{type(error).__name__}: {lines[-1] if lines else ''}"
