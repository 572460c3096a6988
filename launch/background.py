"""How the threads beside the training loop give way to it."""

from __future__ import annotations

import contextlib
import os
import sys
import threading

_NICE = 5


def yield_to_training() -> None:
    """Make the calling thread yield the processor to the process' training thread.

    Linux has a nice value for each thread; elsewhere it belongs to the whole process, and
    nothing is changed.
    """
    if sys.platform == "linux":
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICE)
