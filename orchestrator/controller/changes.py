"""What tells others that the controller has stored something.

Promises: whoever waits is woken by the next change; a count that was read before it has another
value after it. Safe from any thread.
"""

from __future__ import annotations

import threading


class Changes:
    """Of one controller's process."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._count = 0
        self._wake = threading.Event()

    def count(self) -> int:
        """How often something was stored in this process' life."""
        return self._count

    def wait(self, seen: int, timeout_s: float) -> int:
        """Block until something was stored after ``seen``, or the time is over; the new count."""
        with self._changed:
            self._changed.wait_for(lambda: self._count != seen, timeout_s)
            return self._count

    def notify(self, *, wake: bool = True) -> None:
        """Something was stored; ``wake``: a pass may have something to do."""
        with self._changed:
            self._count += 1
            self._changed.notify_all()
        if wake:
            self._wake.set()

    def rest(self, timeout_s: float) -> None:
        """Block until a pass may have something to do, or the time is over."""
        self._wake.wait(timeout_s)
        self._wake.clear()
