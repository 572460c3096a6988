"""Deletes what attempts of a job are done with, beside the passes that decide on it.

Promises: whoever calls it waits for nothing; one thread at most deletes for a job, however often it
is called, and what is called for meanwhile is deleted after what it is at.
"""

from __future__ import annotations

import logging
import threading
from pathlib import Path

from launch.attempt_folder import bury

logger = logging.getLogger(__name__)


class Undertaker:
    """Of one job; its thread lives as long as there is something to do."""

    def __init__(self, job_dir: Path) -> None:
        self._job_dir = job_dir
        self._lock = threading.Lock()
        self._called: int | None = None
        """For which attempt, and not begun yet."""
        self._at_work = False

    def call(self, attempt: int) -> None:
        """Have deleted what ``attempt`` and those before it have given up."""
        with self._lock:
            self._called = attempt
            if self._at_work:
                return
            self._at_work = True
        try:
            threading.Thread(target=self._work, name="undertaker", daemon=True).start()
        except RuntimeError as error:
            # No more threads for now. The next call finds what this one was for.
            logger.warning("nothing of %s is deleted for now: %s", self._job_dir, error)
            with self._lock:
                self._at_work = False

    def _work(self) -> None:
        while True:
            with self._lock:
                attempt, self._called = self._called, None
                if attempt is None:
                    self._at_work = False
                    return
            bury(self._job_dir, attempt)
