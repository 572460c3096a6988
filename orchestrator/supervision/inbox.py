"""Where reports of the ranks wait for the supervisor's next pass.

Promises: safe from any thread; order is kept; bounded: a sender waits while it is full,
which holds up a rank's reporter, never its step.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence

from launch.step_part import Sent


class Inbox:
    """Reports not yet read."""

    def __init__(self, limit: int = 50_000) -> None:
        self._limit = limit
        self._reports: list[Sent] = []
        self._changed = threading.Condition()
        self._woken = False

    @property
    def empty(self) -> bool:
        """Whether all that came was read."""
        return not self._reports

    def put(self, reports: Sequence[Sent], timeout_s: float = 30.0) -> None:
        """Add; waits up to ``timeout_s`` for room."""
        with self._changed:
            self._changed.wait_for(lambda: len(self._reports) < self._limit, timeout_s)
            self._reports.extend(reports)
            self._changed.notify_all()

    def drain(self) -> list[Sent]:
        """All that is here."""
        with self._changed:
            reports, self._reports = self._reports, []
            self._woken = False
            self._changed.notify_all()
            return reports

    def wake(self) -> None:
        """End a wait without a report."""
        with self._changed:
            self._woken = True
            self._changed.notify_all()

    def wait(self, timeout_s: float) -> None:
        """Until there is something to read, or ``timeout_s``."""
        with self._changed:
            self._changed.wait_for(lambda: bool(self._reports) or self._woken, timeout_s)
