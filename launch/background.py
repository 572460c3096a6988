"""How work beside the training loop gives way to it.

Linux has a nice value for each thread; elsewhere it belongs to the whole process, and
nothing is changed. A thread can't take its nice value back without privileges, so what
must run at full speed later is never lowered: polite work gets a thread of its own.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import threading
from collections import deque
from collections.abc import Callable
from typing import Generic, TypeVar

_NICE = 5
"""Added to the process' own: Ray's workers are at 15 already (``worker_niceness``)."""
_NICEST = 19

Work = TypeVar("Work")

logger = logging.getLogger(__name__)


def yield_to_training() -> None:
    """Make the calling thread yield the processor to the process' main thread."""
    if sys.platform == "linux":
        with contextlib.suppress(OSError):
            own = os.getpriority(os.PRIO_PROCESS, os.getpid())
            nice = min(own + _NICE, _NICEST)
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), nice)


def run_politely(work: Callable[[], None]) -> None:
    """Call ``work`` in a thread that yields to others, and wait for it; raises what it raised."""
    raised: list[BaseException] = []

    def call() -> None:
        yield_to_training()
        try:
            work()
        except BaseException as error:  # noqa: BLE001 - carried over to the caller
            raised.append(error)

    thread = threading.Thread(target=call, name="polite")
    thread.start()
    thread.join()
    if raised:
        raise raised[0]


class PoliteQueue(Generic[Work]):
    """One thread that does what is put, one after the other, and yields to training.

    What becomes of each is for ``do`` to tell; an error that it lets out is logged, and the next
    one's turn comes all the same.
    """

    def __init__(self, name: str, do: Callable[[Work], None]) -> None:
        self._do = do
        self._waiting: deque[Work] = deque()
        self._at: list[Work] = []
        """What is being done, if anything is."""
        self._closed = False
        self._changed = threading.Condition()
        threading.Thread(target=self._run, name=name, daemon=True).start()

    def put(self, work: Work) -> None:
        """Have it done; returns at once."""
        with self._changed:
            self._waiting.append(work)
            self._changed.notify_all()

    def pending(self) -> list[Work]:
        """What is not done yet, in order; the first of them may be under way."""
        with self._changed:
            return [*self._at, *self._waiting]

    def take_back(self, which: Callable[[Work], bool]) -> list[Work]:
        """Give up what waits and is ``which``; what that was."""
        with self._changed:
            given_up = [work for work in self._waiting if which(work)]
            self._waiting = deque(work for work in self._waiting if not which(work))
            self._changed.notify_all()
        return given_up

    def wait(self, timeout_s: float) -> bool:
        """Wait until nothing is pending; False if something still is by then."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._at and not self._waiting, timeout_s)

    def close(self) -> None:
        """End the thread after what it is at; the rest is given up."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def _run(self) -> None:
        yield_to_training()
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting or self._closed)
                if self._closed:
                    return
                work = self._waiting.popleft()
                self._at = [work]
            try:
                self._do(work)
            except Exception:
                logger.exception("%s", threading.current_thread().name)
            with self._changed:
                self._at = []
                self._changed.notify_all()
