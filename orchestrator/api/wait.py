"""Answers that are held back until something new is stored, without a thread each.

Promises: a held answer comes as soon as the controller has stored something that concerns it, or
when its time is over; however many wait, other requests get their turn.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from typing import TypeVar

from fastapi.concurrency import run_in_threadpool

from orchestrator.controller.changes import Changes

LOOK_S = 5.0
"""Seconds after which a listener looks although nothing was told."""

Read = TypeVar("Read")


class Bell:
    """Wakes the listeners of an event loop when the controller has stored something.

    One thread for all of them, as long as there are any.
    """

    def __init__(self, changes: Changes) -> None:
        self._changes = changes
        self._lock = threading.Lock()
        self._waiting: dict[asyncio.Event, asyncio.AbstractEventLoop] = {}
        self._thread: threading.Thread | None = None

    async def wait(self, seen: int, timeout_s: float) -> None:
        """Return once the count of changes isn't ``seen`` any more, or the time is over."""
        rung = asyncio.Event()
        with self._lock:
            self._waiting[rung] = asyncio.get_running_loop()
            if self._thread is None:
                # From what this listener has seen on: a change may come before the thread does.
                self._thread = threading.Thread(
                    target=self._listen, args=(seen,), name="bell", daemon=True
                )
                self._thread.start()
        try:
            if self._changes.count() == seen:
                async with asyncio.timeout(timeout_s):
                    await rung.wait()
        except TimeoutError:
            pass
        finally:
            with self._lock:
                self._waiting.pop(rung, None)

    async def held(
        self, wait_s: float, read: Callable[[], Read], done: Callable[[Read], bool]
    ) -> Read:
        """What ``read`` gives, as soon as it is ``done`` or the time is over."""
        deadline = time.monotonic() + wait_s
        while True:
            seen = self._changes.count()
            found = await run_in_threadpool(read)
            left = deadline - time.monotonic()
            if left <= 0 or done(found):
                return found
            await self.wait(seen, min(left, LOOK_S))

    def _listen(self, seen: int) -> None:
        while True:
            now = self._changes.wait(seen, LOOK_S)
            with self._lock:
                if not self._waiting:
                    self._thread = None
                    return
                if now == seen:
                    continue
                for rung, loop in self._waiting.items():
                    loop.call_soon_threadsafe(rung.set)
                self._waiting.clear()
            seen = now
