"""Which queued job is given nodes next, and what those that can't have them yet wait for.

Promises: one job a pass is given nodes; who can't have them yet holds up those behind it, but who
can never have them, or not before the quarantine of some has ended, holds up nobody; a queue that
nothing came of is not gone over again before something has changed that it depends on.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from orchestrator.controller.preemption import Preemption
from orchestrator.controller.seen import Act, Seen
from orchestrator.controller.waits import Waits
from orchestrator.lifecycle import Cause
from orchestrator.nodes.desk import NodeDesk
from orchestrator.nodes.sight import Sight
from orchestrator.placement.fair_queue import turns
from orchestrator.store.database import Store
from orchestrator.store.rows import JobRow

Turn = Callable[[JobRow, Seen, Act], bool | None]
"""Lets a job take its turn: whether it moved; None: its turn failed."""


LOOK_S = 60.0
"""Seconds between two looks at a queue for which nothing has changed."""


class Admission:
    """Of one controller. ``fixed``: no node will ever be added."""

    def __init__(
        self,
        store: Store,
        desk: NodeDesk,
        preemption: Preemption,
        waits: Waits,
        turn: Turn,
        *,
        fixed: bool,
    ) -> None:
        self._store = store
        self._desk = desk
        self._preemption = preemption
        self._waits = waits
        self._turn = turn
        self._fixed = fixed
        self._admitted: object = None
        """All that the last look at the queue depended on, where it led to nothing."""

    def admit(self, seen: Seen) -> bool:
        """Give nodes to the first in the queue; who can't have them yet holds up the rest, and
        lower priorities make room for the first of these. Whether any job moved."""
        now, holding, queued = seen.now, seen.holding, seen.queued
        # One look for all of them: a queue may be long.
        sight = self._desk.sight(now)
        # Some waits end by themselves, as that for a job which couldn't be preempted.
        depends = (seen.version, sight.told(), seen.asked, self._desk.short, now // LOOK_S)
        if queued and depends == self._admitted:
            return False
        self._admitted = None
        # Who could have nodes at no turn takes none: it would be the user's next job that waits.
        rows = {row.id: row for row in queued if sight.fit(row).once_free}
        order = turns(
            (row.ticket for row in rows.values()),
            (row.ticket for row in holding),
            self._store.served_at() if rows else {},
        )
        ahead = ""
        waiting: list[JobRow] = []
        failed = False
        while rows and not ahead:
            row = rows.pop(next(order).job)
            admitted = self._turn(row, seen, partial(self._one, sight=sight, holding=holding))
            if admitted:
                # The next pass sees what is left.
                self._desk.wish(waiting, holding, now)
                return True
            failed |= admitted is None
            if admitted is not None:
                waiting.append(row)
                ahead = row.id
        self._waits.ahead = ahead
        # Of those behind it nobody's place matters; who holds up nobody is told what it waits for.
        for row in queued:
            if sight.fit(row).once_free:
                continue
            admitted = self._turn(row, seen, partial(self._one, sight=sight, holding=()))
            if admitted:
                self._desk.wish(waiting, holding, now)
                return True
            failed |= admitted is None
            if admitted is not None:
                waiting.append(row)
        self._waits.behind(list(rows.values()), now)
        self._desk.wish(waiting, holding, now)
        if queued and not failed:
            self._admitted = depends
        return False

    def _one(self, row: JobRow, seen: Seen, sight: Sight, holding: Sequence[JobRow]) -> bool:
        now = seen.now
        answer = sight.fit(row)
        # One that ran before did fit: what is missing was lost, and may come back.
        if not answer.ever and self._fixed and row.attempt == 0:
            self._store.change(row.id, Cause.CAN_NEVER_FIT, f"can never fit: {answer.reason}", now)
            return True
        missing = answer.reason or self._desk.admit(row, now)
        if not missing:
            return True
        room = ""
        if answer.once_free:
            room = self._preemption.make_room(row, holding, seen.asked, sight)
        self._waits.one(row, f"{missing}; {room}" if room else missing, now)
        return False
