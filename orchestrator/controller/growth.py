"""Jobs that run on fewer nodes than they want: which of them starts anew on more, and when.

That costs a checkpoint and a start. Promises: of several that would have what is free one is
asked, whom the queue would give it to before all that wait; what one that starts will take counts
as taken; nobody stops for nodes that are left out for it, or that Ray doesn't grant; a job that
got nothing by it is left in peace for a while, twice as long each time, unless more nodes are there
than it tried. That is counted from what is stored.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from orchestrator.controller.preemption import GROW, Preemption, grows
from orchestrator.controller.seen import Seen
from orchestrator.lifecycle import JobState
from orchestrator.node_slot import NodeSlot, working
from orchestrator.nodes.desk import NodeDesk
from orchestrator.placement.fair_queue import turns
from orchestrator.placement.placement import Mended
from orchestrator.recovery.controls import STOPS, Control
from orchestrator.store.database import Store
from orchestrator.store.rows import JobRow

GROW_AFTER_S = 60.0
"""Seconds that an attempt on fewer nodes than the job wants is left in peace: nodes that come and
go would cost more than they bring."""
LOOK_EVERY_S = 2.0
"""Seconds between two looks for nodes."""
GROW_REST_S = 600.0
"""Seconds that a job is left in peace after it got nothing by starting anew; then twice as long."""
GROW_LONGEST_S = 6 * 3600.0
"""And no longer than this."""
UNGRANTED_S = 60.0
"""Seconds for which nobody is to grow onto a node that Ray didn't grant; then twice as long."""


@dataclass(frozen=True, slots=True)
class _InVain:
    """Starts on more nodes that a job got nothing by, since one that it did."""

    times: int = 0
    nodes: int = 0
    """The most that one of them was on."""
    last: float = 0.0
    """When it was asked to."""

    def rests(self, nodes: int, now: float) -> bool:
        """Whether the job is left in peace, though there are ``nodes``."""
        rest = min(GROW_REST_S * 2.0 ** (self.times - 1), GROW_LONGEST_S)
        return self.times > 0 and nodes <= self.nodes and now - self.last < rest


class Growth:
    """Of one controller."""

    def __init__(self, store: Store, desk: NodeDesk, preemption: Preemption) -> None:
        self._store = store
        self._desk = desk
        self._preemption = preemption
        self._looked: float | None = None
        self._seen: Seen | None = None
        self._next: tuple[str, Mended] | None = None
        """Whose turn it is by the last look, and where it would stand."""
        # Of this process: a controller that restarts asks Ray for them again.
        self._ungranted: dict[str, tuple[float, float]] = {}
        """Nodes that Ray didn't grant: until when, and for how many seconds that is."""
        self._in_vain: dict[str, tuple[int, _InVain]] = {}
        """By job, as it was found in which attempt."""

    def let_grow(self, row: JobRow, seen: Seen) -> None:
        """Ask a job that runs on fewer nodes than it wants to start anew on more, where it is the
        one who would have them."""
        if row.state is not JobState.RUNNING or not _small(row):
            return
        if seen is not self._seen:
            if self._looked is not None and seen.now - self._looked < LOOK_EVERY_S:
                return
            self._seen, self._looked = seen, seen.now
            self._next = self._whose_turn(seen)
        if self._next is None or self._next[0] != row.id:
            return
        plan = self._next[1]
        if not self._granted(row, plan.taken, seen.now):
            return
        reason = (
            f"{len(working(plan.nodes))} of the {row.spec.num_nodes} nodes that it wants are there"
        )
        self._preemption.ask(row, f"{GROW}{row.attempt}", reason, seen.now, grow=True)

    def _whose_turn(self, seen: Seen) -> tuple[str, Mended] | None:
        small = [row for row in seen.holding if _small(row)]
        self._in_vain = {r.id: self._in_vain[r.id] for r in small if r.id in self._in_vain}
        sight = self._desk.sight(seen.now)
        resting = [node for node, (until, _) in self._ungranted.items() if seen.now < until]
        sight = sight.without_nodes(resting)
        for row in small:
            if _starts(row, seen) and isinstance(plan := sight.mended(row), Mended):
                sight = sight.without(row, plan.taken)
        could: dict[str, tuple[JobRow, Mended]] = {}
        for row in small:
            if row.state is JobState.RUNNING and not _asked(row, seen):
                plan = sight.mended(row)
                if isinstance(plan, Mended) and self._may(row, len(working(plan.nodes)), seen.now):
                    could[row.id] = replace(row, nodes=()), plan
        if not could:
            return None
        others = [row for row in seen.holding if row.id not in could]
        order = turns(
            (anew.ticket for anew, _ in could.values()),
            (row.ticket for row in others),
            self._store.served_at(),
        )
        for ticket in order:
            anew, plan = could[ticket.job]
            # As it would stand there without its nodes.
            rest = [row for row in seen.holding if row.id != ticket.job]
            if self._preemption.first([*seen.queued, anew], rest, sight) is anew:
                return ticket.job, plan
        return None

    def _may(self, row: JobRow, nodes: int, now: float) -> bool:
        """Whether it may start anew on so many."""
        if nodes <= len(working(row.nodes)):
            return False
        began = self._store.attempts.of(row.id)[-1]["started_at"]
        if now - began < GROW_AFTER_S or self._preemption.refused(GROW, row, now):
            return False
        return not self._vain_of(row).rests(nodes, now)

    def _vain_of(self, row: JobRow) -> _InVain:
        """It doesn't change while an attempt lasts."""
        attempt, found = self._in_vain.get(row.id, (0, _InVain()))
        if attempt != row.attempt:
            found = self._counted(row)
            self._in_vain[row.id] = row.attempt, found
        return found

    def _counted(self, row: JobRow) -> _InVain:
        asked = [r.control for r in self._store.controls.of(row.id) if grows(r.control)]
        had = self._store.attempts.nodes_of(row.id) if asked else {}
        times, most, last = 0, 0, row.attempt
        for control in reversed(asked):
            before = int(control.key.removeprefix(GROW))
            more = [n for n in range(before + 1, last + 1) if had.get(n, 0) > had.get(before, 0)]
            if any(self._trained(row.id, n) for n in more):
                break
            times, most, last = times + 1, max([most, *(had[n] for n in more)]), before
        return _InVain(times, most, asked[-1].time) if times else _InVain()

    def _trained(self, job: str, attempt: int) -> bool:
        told = self._store.past.events_of_attempt(job, attempt, "state")
        return any(event["detail"]["to"] == JobState.RUNNING.word for event in told)

    def _granted(self, row: JobRow, seats: Sequence[NodeSlot], now: float) -> bool:
        """Whether Ray would grant them, as far as trying tells; not to a job that moved on."""
        tried = self._desk.try_out(row, seats, now)
        if tried is None:
            return False
        refused = {seat.node_id for seat in tried}
        for node in refused:
            _, seconds = self._ungranted.get(node, (0.0, UNGRANTED_S / 2))
            rest = min(2 * seconds, GROW_REST_S)
            self._ungranted[node] = now + rest, rest
        if not refused:
            for seat in seats:
                self._ungranted.pop(seat.node_id, None)
        return not refused


def _small(row: JobRow) -> bool:
    """Whether it holds nodes, and fewer than it would run on."""
    return len(row.asks.counts) > 1 and 0 < len(working(row.nodes)) < row.asks.need.nodes


def _asked(row: JobRow, seen: Seen) -> list[Control]:
    """What is to stop it."""
    return [control for control in seen.asked.get(row.id, ()) if control.kind in STOPS]


def _starts(row: JobRow, seen: Seen) -> bool:
    """Whether it is about to start on what is free, or has been asked to."""
    if row.state is JobState.RUNNING:
        return any(grows(control) for control in _asked(row, seen))
    return row.state in (JobState.QUEUED, JobState.STARTING, JobState.RECOVERING)
