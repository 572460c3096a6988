"""Preflight over a group's nodes, without waiting for them: started, and asked for its verdict.

Each node is probed by itself, then those without a fault meet in pairs. Promises: nothing here
blocks; a node that hasn't answered when the time is over has failed; the worker that is asked is
one of the job's own.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from launch.preflight import Answer, Demand, Failure, Limits, Link, Verdict, blame, judge
from launch.preflight_probes import Meeting, probe_links, probe_node
from launch.rank_group import Seat

logger = logging.getLogger(__name__)

LINK_TIMEOUT_S = 5.0
"""Seconds that a collective of two nodes may take."""


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
        self._answered: dict[str, float] = {}
        self._linked: dict[str, Any] = {}
        self._answers: dict[str, Answer] = {}
        self._failed: dict[str, Failure] = {}
        fresh = [seat for seat in self._seats if seat.node_id in self._newcomers]
        self._probes = {
            seat.node_id: self._ask(seat.node_id, probe_node, demand, seat.node_ip)
            for seat in fresh
        }

    def verdict(self, now: float) -> Verdict | None:
        """What it came to; None while it is under way."""
        late = now > self._deadline
        if not self._linked:
            if not self._gather() and not late:
                return None
            self._judge(late)
            if self._failed or len(self._seats) < 2:
                return self._verdict(now, [])
            self._link()
            return None
        links = self._links(late)
        return None if links is None else self._verdict(now, links)

    def _gather(self) -> bool:
        """Take in probes that are done; whether all are."""
        for node_id in [n for n in self._probes if n in self._answered]:
            value, error = _result(self._probes.pop(node_id))
            if error:
                self._failed[node_id] = Failure(f"the probe failed: {error}", False)
            else:
                self._answers[node_id] = Answer(value, self._began, self._answered[node_id])
        return not self._probes

    def _judge(self, late: bool) -> None:
        if late:
            waited = f"no answer for {self._deadline - self._began:.0f} s (preflight.timeout_s)"
            self._failed |= {node: Failure(waited, False) for node in self._probes}
        for node_id, answer in self._answers.items():
            failure = judge(answer, self._demand, self._limits)
            if failure is not None:
                self._failed[node_id] = failure

    def _link(self) -> None:
        # The host of the meeting is a newcomer: only those have told of a port.
        order = self._seats = sorted(self._seats, key=lambda s: s.node_id not in self._newcomers)
        port = self._answers[order[0].node_id].probe.port
        newcomers = tuple(range(len(self._answers)))
        self._answered.clear()
        for place, seat in enumerate(order):
            meeting = Meeting(
                address=order[0].node_ip,
                port=port,
                place=place,
                nodes=len(order),
                here=seat.node_ip,
                timeout_s=LINK_TIMEOUT_S,
                on_gpu=self._demand.on_gpu,
                newcomers=newcomers,
            )
            self._linked[seat.node_id] = self._ask(seat.node_id, probe_links, meeting)

    def _links(self, late: bool) -> list[Link] | None:
        if len(self._answered) < len(self._linked) and not late:
            return None
        links: list[Link] = []
        for seat in self._seats:
            if seat.node_id not in self._answered:
                self._failed[seat.node_id] = Failure("its links were not tried in time", False)
                continue
            found, error = _result(self._linked[seat.node_id])
            if error:
                self._failed[seat.node_id] = Failure(f"the links failed: {error}", False)
            else:
                links += found
        newcomers = [i for i, s in enumerate(self._seats) if s.node_id in self._newcomers]
        for place, failure in blame(links, newcomers, self._limits).items():
            self._failed.setdefault(self._seats[place].node_id, failure)
        return links

    def _verdict(self, now: float, links: Sequence[Link]) -> Verdict:
        speeds = [link.mbit_s for link in links if not link.error]
        devices = {answer.probe.device for answer in self._answers.values()}
        return Verdict(
            failed=dict(self._failed),
            seconds=now - self._began,
            nodes=len(self._seats),
            slowest_mbit_s=min(speeds, default=None),
            device=", ".join(sorted(devices)),
        )

    def _ask(self, node_id: str, function: Callable[..., Any], *arguments: Any) -> Any:
        reference = self._workers[node_id].call.remote(function, *arguments)

        def settled(_: object) -> None:
            self._answered[node_id] = self._clock()
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
