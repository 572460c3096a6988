"""The end of rank processes on the node that they run on."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Sequence

TERM_S = 0.5
"""Seconds after which a killed worker's process is sent SIGKILL by its number."""
GONE_S = 10.0
"""Seconds that processes may take to disappear."""


def end_processes(pids: Sequence[int]) -> list[int]:
    """Wait for worker processes of this node to disappear, with SIGKILL's help; who is left."""
    started = time.monotonic()
    left = [pid for pid in pids if runs(pid)]
    while left and time.monotonic() - started < GONE_S:
        if time.monotonic() - started > TERM_S:
            for pid in filter(is_ray_worker, left):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        time.sleep(0.005)
        left = [pid for pid in left if runs(pid)]
    return left


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
