"""What jobs wait for, in words: each is told when it changes.

Promises: a wait that goes on writes nothing.
"""

from __future__ import annotations

from collections.abc import Sequence

from orchestrator.controller.changes import Changes
from orchestrator.lifecycle import JobState
from orchestrator.store.database import Store
from orchestrator.store.rows import JobRow

ITS_TURN = "waits its turn in the queue"
"""Why a job waits that others come before; behind whom is in ``Waits.reason_of``. One text,
whoever is first: with another one for each, ten thousand rows would be written whenever a job
starts."""


class Waits:
    """Of one controller."""

    def __init__(self, store: Store, changes: Changes) -> None:
        self._store = store
        self._changes = changes
        self.ahead = ""
        """The job that holds up those behind it; empty: none does."""

    def one(self, row: JobRow, reason: str, now: float) -> None:
        """``row`` waits, and for what."""
        if row.reason != reason:
            self._store.wait(row.id, reason, now)
            self._changes.notify(wake=False)

    def behind(self, rows: Sequence[JobRow], now: float) -> None:
        """These wait behind ``ahead``."""
        new = [row.id for row in rows if row.reason != ITS_TURN]
        if new:
            self._store.wait_all(new, ITS_TURN, f"waits behind {self.ahead}", now)
            self._changes.notify(wake=False)

    def reason_of(self, row: JobRow) -> str:
        """``row.reason``, and behind which job one waits that waits its turn."""
        if row.reason == ITS_TURN and row.state is JobState.QUEUED and self.ahead:
            return f"waits behind {self.ahead}"
        return row.reason
