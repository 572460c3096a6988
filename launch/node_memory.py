"""How much memory a node still has, containers' limits included."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

_LIMITS = (
    ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current", "/sys/fs/cgroup/memory.stat"),
    (
        "/sys/fs/cgroup/memory/memory.limit_in_bytes",
        "/sys/fs/cgroup/memory/memory.usage_in_bytes",
        "/sys/fs/cgroup/memory/memory.stat",
    ),
)
"""Limit, use and its parts, of control groups version 2 and 1."""


def free_bytes() -> int:
    """Memory that processes of this node, or of this container, may still take.

    What the page cache holds counts as free: it goes when it is asked for.
    """
    import psutil

    free = int(psutil.virtual_memory().available)
    for limit, used, parts in _LIMITS:
        with suppress(OSError, ValueError):  # no such group, or "max": no limit
            room = int(Path(limit).read_text()) - int(Path(used).read_text())
            free = min(free, max(0, room) + _inactive_cache(Path(parts)))
    return free


def _inactive_cache(stat: Path) -> int:
    for line in stat.read_text().splitlines():
        name, _, value = line.partition(" ")
        if name in ("inactive_file", "total_inactive_file"):
            return int(value)
    return 0
