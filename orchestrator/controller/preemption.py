"""Room for a job of higher priority: which jobs are asked to go back into the queue, and how.

Promises: a job is asked once an attempt for the same job, and not soon again after it could not
save what it has trained; what it is asked is durable, as anything that a person asks; its
supervisor writes a checkpoint first, and goes on where that can't be had; its nodes go to a job of
higher priority or stay its own, whoever else waits.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Literal

from orchestrator.controller.seen import Seen
from orchestrator.lifecycle import Cause, JobState
from orchestrator.node_slot import NodeSlot
from orchestrator.nodes.desk import NodeDesk
from orchestrator.nodes.sight import Sight
from orchestrator.placement.fair_queue import fewest, first, victims
from orchestrator.recovery.controls import STOPS, Control
from orchestrator.store.controls import ControlRefusedError
from orchestrator.store.database import Store
from orchestrator.store.rows import JobRow

THE_QUEUE = "the queue"
"""Who asks, in the records."""
REFUSED_REST_S = 600.0
"""Seconds that a job which couldn't be saved is left in peace."""
Fate = Literal["back", "waits", "kept"]
"""Of nodes: given back, held a while longer, or for the job to go on with."""
GROW = "grow-"
"""How the keys begin by which a job is asked to start anew on more nodes; its attempt follows."""


class Preemption:
    """Asks jobs of lower priority for their nodes."""

    def __init__(self, store: Store, desk: NodeDesk) -> None:
        self._store = store
        self._desk = desk

    def make_room(
        self,
        row: JobRow,
        holding: Sequence[JobRow],
        asked: Mapping[str, Sequence[Control]],
        sight: Sight,
    ) -> str:
        """Ask for what ``row`` needs, unless enough is on its way; what it waits for, or empty.

        Spares of less important jobs come before their ranks. ``holding``: jobs that hold nodes;
        ``asked``: what is open, by job.
        """
        going = frozenset(r.id for r in holding if not _stays(r, asked, row.priority))
        rows = {r.id: r for r in holding}

        def fits_without(jobs: frozenset[str]) -> bool:
            return self._desk.fits_without(row, [rows[job] for job in jobs | going], sight)

        if going and fits_without(frozenset()):
            return f"waits for {', '.join(sorted(going))} to give nodes back"
        spares = fewest(
            [(r, s) for r in _by_importance(holding) for s in r.nodes if _may_take(row, r, s)],
            lambda seats: self._desk.fits_with(row, seats, sight),
        )
        if spares:
            whose = {other.id: other for other, _ in spares}
            for other in whose.values():
                mine = [seat for owner, seat in spares if owner is other]
                self._desk.give_up_spares(other, mine, row.id, sight.now)
            return f"takes spares of {', '.join(whose)}"
        staying = [
            r.ticket
            for r in holding
            if r.id not in going and not self.refused(_prefix(row), r, sight.now)
        ]
        chosen = victims(row.ticket, staying, fits_without)
        for ticket in chosen:
            reason = f"{row.id} has priority {row.priority}, this job {ticket.priority}"
            key = f"{_prefix(row)}{rows[ticket.job].attempt}"
            self.ask(rows[ticket.job], key, reason, sight.now)
        if not chosen:
            return ""
        told = ", ".join(f"{t.job} (priority {t.priority})" for t in chosen)
        return f"preempts {told} after a checkpoint"

    def fate(self, row: JobRow, seen: Seen) -> Fate:
        """What becomes of the nodes of a job that holds some and has stopped.

        What the queue has stopped gives them to a job that may preempt it and has all it needs
        with them; it waits for what others give to that one too, and goes on where none is there.
        """
        if row.state is not JobState.QUEUED or not row.nodes:
            return "back"
        came = self._store.past.newest_event(row.id, ("state",))
        if came is None or came["detail"]["cause"] != Cause.PREEMPTED.value:
            return "back"
        if not row.asks.preemptible:
            return "kept"
        sight = self._desk.sight(seen.now)
        next_one = self.first(seen.queued, seen.holding, sight)
        above = [other for other in seen.holding if other.priority > row.priority]
        waiting = [other for other in above if self._desk.short_of(other, sight)]
        if next_one is not None and next_one.priority > row.priority:
            waiting.insert(0, next_one)
        stopped = [other for other in seen.holding if not other.state.holds_nodes]
        for other in waiting:
            if row.id in (needed := self._needed(other, stopped, sight)):
                return "back"
            if needed or self._desk.fits_without(other, [], sight):
                continue
            going = [r for r in seen.holding if not _stays(r, seen.asked, other.priority)]
            if self._desk.fits_without(other, going, sight):
                return "waits"
        return "kept"

    def _needed(self, row: JobRow, stopped: Sequence[JobRow], sight: Sight) -> frozenset[str]:
        """Of jobs that have stopped, whose nodes ``row`` needs to have all of its own; none where
        it has them, or wouldn't with all of theirs. The least important ones, and no more."""
        chosen = fewest(
            _by_importance(stopped), lambda some: self._desk.fits_without(row, some, sight)
        )
        return frozenset(r.id for r in chosen)

    def first(
        self, queued: Sequence[JobRow], holding: Sequence[JobRow], sight: Sight
    ) -> JobRow | None:
        """Whose turn it is of those that wait."""
        rows = {row.id: row for row in queued}
        found = first(
            (row.ticket for row in queued),
            (row.ticket for row in holding),
            self._store.served_at(),
            # What runs does fit.
            lambda t: rows[t.job].state.holds_nodes or sight.fit(rows[t.job]).once_free,
        )
        return None if found is None else rows[found.job]

    def ask(self, row: JobRow, key: str, reason: str, now: float, *, grow: bool = False) -> None:
        """Ask a job to go back into the queue, once under this key; one that doesn't run any more,
        or not yet, isn't asked, nor one whose attempt, which the key names, is over. ``grow``: for
        more nodes, which its next attempt would have without that."""
        ends = row.attempt if grow else None
        control = Control(key, "preempt", THE_QUEUE, now, reason, attempt=ends)
        # It may have ended, or begun another attempt, since ``row`` was read.
        with suppress(ControlRefusedError):
            self._store.controls.ask(row.id, control, row.attempt)

    def refused(self, prefix: str, victim: JobRow, now: float) -> bool:
        """Whether it could not go when it was last asked by controls named so: in this attempt, or
        a short while ago. A refusal begins another attempt: asked in each, it would never train.
        """
        mine = [r for r in self._store.controls.of(victim.id) if r.control.key.startswith(prefix)]
        return (
            bool(mine)
            and mine[-1].answered_at is not None
            and (
                # Done or refused: under the same key nothing would be asked again.
                mine[-1].control.key == f"{prefix}{victim.attempt}"
                or (
                    mine[-1].state == "refused" and 0 <= now - mine[-1].answered_at < REFUSED_REST_S
                )
            )
        )


def grows(control: Control) -> bool:
    """Whether it asks a job to start anew on more nodes."""
    return control.kind == "preempt" and control.key.startswith(GROW)


def _stays(row: JobRow, asked: Mapping[str, Sequence[Control]], priority: int) -> bool:
    """Whether nothing makes the job give its nodes back soon, for one of ``priority``: what is to
    start anew on more nodes gives its own to a more important one alone."""
    if not row.state.holds_nodes or row.state is JobState.CANCELLING:
        return False
    stops = [c for c in asked.get(row.id, ()) if c.kind in STOPS]
    if not all(grows(control) for control in stops):
        return False
    return not stops or row.priority >= priority or not row.asks.preemptible


def _by_importance(holding: Sequence[JobRow]) -> list[JobRow]:
    """The least important and the youngest first."""
    return sorted(holding, key=lambda row: (row.priority, -row.ticket.since, row.id))


def _may_take(row: JobRow, other: JobRow, seat: NodeSlot) -> bool:
    """Whether ``seat`` is a spare of a less important job's, which has ranks."""
    return seat.spare and other.priority < row.priority and other.state.holds_nodes


def _prefix(row: JobRow) -> str:
    """How the keys begin by which a waiting job asks; the asked one's attempt follows."""
    return f"preempt-{hashlib.sha256(row.id.encode()).hexdigest()[:16]}-"
