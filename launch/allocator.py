"""How a rank on a CPU keeps memory: it doesn't give back what the next step takes again.

glibc maps large blocks anew for each tensor and unmaps them when it dies, so that a step
pays two thousand page faults for memory that it had a step ago: about four hundredths of
its processor time in the demo's model. The price is that a rank's
resident memory stays at its peak, until what is free of it is given back by hand.
"""

from __future__ import annotations

import contextlib
import ctypes
import sys

M_TRIM_THRESHOLD = -1
M_MMAP_THRESHOLD = -3
_KEPT_BYTES = 1 << 30
"""Blocks up to this size come from the heap, and so much of its free end is kept."""


def keep_freed_memory() -> None:
    """For this process, from now on; does nothing where there is no glibc."""
    if sys.platform != "linux":
        return
    with contextlib.suppress(OSError, AttributeError):
        mallopt = ctypes.CDLL("libc.so.6").mallopt
        # Setting either also ends glibc's own adaptation of the other.
        mallopt(M_MMAP_THRESHOLD, _KEPT_BYTES)
        mallopt(M_TRIM_THRESHOLD, _KEPT_BYTES)


def give_back_freed_memory() -> None:
    """All that this process has let go of, to whoever else wants it; what it takes again costs page
    faults again. Does nothing where there is no glibc."""
    if sys.platform != "linux":
        return
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL("libc.so.6").malloc_trim(0)
