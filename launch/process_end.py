"""The end of rank processes on the node that they run on."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import stat
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

TERM_S = 0.5
"""Seconds after which a killed worker's process is sent SIGKILL by its number."""
GONE_S = 10.0
"""Seconds that processes may take to disappear."""


class Enlisted:
    """The ranks that were last started on this node, as far as their processes still run.

    Whoever started them may be gone, and a rank that is frozen can't notice that.
    """

    def __init__(self, name: str = "") -> None:
        """``name``: under which another process of this node takes the list over; "": none does."""
        folder = _folder() if name else None
        self._file = None if folder is None else folder / f"{name}.json"
        self._since: dict[int, float] = {}
        """When each process began: its number may be another's by now."""
        if self._file is not None:
            with contextlib.suppress(OSError, ValueError, TypeError, AttributeError):
                told = json.loads(self._file.read_text())
                self._since = {int(pid): float(since) for pid, since in told.items()}

    def replace(self, pids: Sequence[int]) -> None:
        """These are the ranks from now on."""
        self._since = {pid: since for pid in pids if (since := _began(pid)) is not None}
        if self._file is not None:
            # Without it the ranks are ended as well, but for frozen ones.
            with contextlib.suppress(OSError):
                self._file.write_text(json.dumps(self._since))

    def end(self) -> list[int]:
        """End them by force; who is left after ``GONE_S``."""
        theirs = [pid for pid, since in self._since.items() if _began(pid) == since]
        self._since = {}
        if self._file is not None:
            with contextlib.suppress(OSError):
                self._file.unlink(missing_ok=True)
        return end_processes(theirs, 0.0)


def end_processes(pids: Sequence[int], patience_s: float = TERM_S) -> list[int]:
    """Wait for worker processes of this node to disappear; who is left.

    After ``patience_s`` with SIGKILL's help, which ends stopped ones too.
    """
    started = time.monotonic()
    left = [pid for pid in pids if runs(pid)]
    while left and time.monotonic() - started < GONE_S:
        if time.monotonic() - started >= patience_s:
            for pid in filter(is_ray_worker, left):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        time.sleep(0.005)
        left = [pid for pid in left if runs(pid)]
    return left


def _folder() -> Path | None:
    """Of this user, on this node; None where somebody else made it, who could have us write and
    end what he likes."""
    folder = Path(tempfile.gettempdir()) / f"octavo-ranks-{os.getuid()}"
    with contextlib.suppress(OSError):
        folder.mkdir(mode=0o700, exist_ok=True)
        found = folder.lstat()
        private = stat.S_ISDIR(found.st_mode) and not found.st_mode & 0o077
        if private and found.st_uid == os.getuid():
            return folder
    return None


def _began(pid: int) -> float | None:
    """When the process began, by the system's clock; None if there is none."""
    import psutil

    try:
        return float(psutil.Process(pid).create_time())
    except psutil.NoSuchProcess:
        return None


def runs(pid: int) -> bool:
    """Whether there is a process of that number that has not ended."""
    import psutil

    try:
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def is_ray_worker(pid: int) -> bool:
    """Whether the number is still a Ray worker's: it may be another process' by now."""
    import psutil

    try:
        return any(part.startswith("ray::") for part in psutil.Process(pid).cmdline()[:1])
    except psutil.Error:
        return False
