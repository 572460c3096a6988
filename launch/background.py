"""How work beside the training loop gives way to it.

Linux has a nice value for each thread; elsewhere it belongs to the whole process, and
nothing is changed. A thread can't take its nice value back without privileges, so what
must run at full speed later is never lowered: polite work gets a thread of its own.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from collections.abc import Callable

_NICE = 5


def yield_to_training() -> None:
    """Make the calling thread yield the processor to the process' training thread."""
    if sys.platform == "linux":
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICE)


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
