"""What tests ask of processes by their ids."""

from __future__ import annotations

import psutil


def runs(pid: int) -> bool:
    """Whether it is there, and not just waiting to be reaped."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
