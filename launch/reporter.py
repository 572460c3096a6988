"""What a rank has to tell, carried to its supervisor by a thread of its own.

Promises: ``send`` never waits; reports arrive in the order they were sent, in batches, at
most about ``interval_s`` after they were made; a call that fails is tried again. A report
may be given as a function, which the thread calls: that is how values are read off a
device without making the step wait for it. When that function fails, the next ``send`` raises:
a rank whose steps can't be told must not train on unseen.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence

from launch.background import yield_to_training
from launch.commands import Report

Outbox = Callable[[Sequence[Report]], None]
"""Delivers a batch; returns when it was received, raises when it wasn't."""

_RETRY_S = 1.0

logger = logging.getLogger(__name__)


class ReportFailedError(RuntimeError):
    """A report could not be made; the message says what was raised."""


class Reporter:
    """One thread between the training loop and the outbox."""

    def __init__(self, outbox: Outbox, interval_s: float = 0.05, capacity: int = 10_000) -> None:
        self._outbox = outbox
        self._interval_s = interval_s
        self._capacity = capacity
        self._waiting: deque[Report | Callable[[], Report]] = deque()
        self._changed = threading.Condition()
        self._delivering = False
        self._urgent = False
        self._closed = False
        self._dropped = 0
        self._failed: Exception | None = None
        self._thread = threading.Thread(target=self._run, name="reporter", daemon=True)
        self._thread.start()

    def send(self, report: Report | Callable[[], Report]) -> None:
        """Queue a report; with ``capacity`` of them undelivered the oldest is given up.

        Raises ReportFailedError when an earlier one could not be made.
        """
        self.raise_failure()
        with self._changed:
            if len(self._waiting) >= self._capacity:
                self._waiting.popleft()
                self._dropped += 1
                if self._dropped & (self._dropped - 1) == 0:
                    logger.warning("%d reports were given up undelivered", self._dropped)
            self._waiting.append(report)
            self._changed.notify_all()

    def raise_failure(self) -> None:
        """Raises ReportFailedError when a report could not be made."""
        if self._failed is not None:
            cause = f"{type(self._failed).__name__}: {self._failed}"
            raise ReportFailedError(f"a step could not be reported: {cause}") from self._failed

    def flush(self, timeout_s: float = 10.0) -> bool:
        """Wait until all that was sent is delivered; False if it isn't by then."""
        with self._changed:
            self._urgent = True
            self._changed.notify_all()
            done = self._changed.wait_for(
                lambda: not self._waiting and not self._delivering, timeout_s
            )
            self._urgent = False
        return done

    def close(self, timeout_s: float = 10.0) -> None:
        """Deliver what is left, for at most ``timeout_s``, and end the thread."""
        if self._closed:
            return
        self.flush(timeout_s)
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._thread.join(timeout_s)

    def _run(self) -> None:
        yield_to_training()
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting or self._closed)
                if self._closed:
                    return
                # What follows within the interval goes along.
                self._changed.wait_for(lambda: self._urgent or self._closed, self._interval_s)
                waiting = list(self._waiting)
                self._waiting.clear()
                self._delivering = True
            self._deliver(self._made(waiting))
            with self._changed:
                self._delivering = False
                self._changed.notify_all()

    def _deliver(self, batch: list[Report]) -> None:
        while not self._closed:
            try:
                self._outbox(batch)
                return
            except Exception as error:  # noqa: BLE001 - whatever the carrier raises, training goes on
                logger.warning("%d reports were not delivered, trying again: %r", len(batch), error)
                time.sleep(_RETRY_S)

    def _made(self, waiting: Sequence[Report | Callable[[], Report]]) -> list[Report]:
        batch = []
        for report in waiting:
            try:
                batch.append(report() if callable(report) else report)
            except Exception as error:
                logger.exception("a report could not be made")
                self._failed = self._failed or error
        return batch
