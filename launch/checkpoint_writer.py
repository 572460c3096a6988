"""A rank's checkpoint files on their way to disk, by a thread of their own.

A disk may take longer than a keeper by far, and must hold up nothing: neither training, nor the
copies in memory. Promises: what is written stays leased until it is; no more than one state is
written and one waits, for who asks first looks at ``busy``; what became of each is told; what the
last one may take follows from what it weighs and from what those before it took.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from launch.background import PoliteQueue
from launch.checkpoints import write_rank_file
from launch.digests import Payload
from launch.snapshots import SnapshotKey

WRITE_TIMEOUT_S = 600.0
"""Seconds that the last checkpoint may take at least: it is what the job was for."""
MOST_WRITE_S = 4 * 3600.0
"""And at most: what takes longer hangs."""
LEAST_WRITE_RATE = 50e6
"""Bytes a second that a storage takes from all ranks together, at least: written and read back
over 1 Gbit/s."""
SHOWN_TIMES = 3.0
"""How much longer than any so far the last checkpoint may take: it may wait for one before it."""

Told = Callable[[Path | Exception], None]
"""Called by the writer's thread with the file, or with why there is none."""


@dataclass(slots=True)
class _Write:
    key: SnapshotKey
    payload: Payload
    digest: str
    told: Told


def is_due(
    step: int, *, every: int, last: int, stopping: bool, writing: bool
) -> Literal["no", "write", "left out"]:
    """Whether the state before ``step`` goes to disk. Pure, and the same on all ranks.

    ``every`` steps, 0 for never; ``last`` is the job's end, which always does, as a stop does.
    ``writing``: a rank still writes the one before, so that this one is left out.
    """
    if stopping or step == last:
        return "write"
    if every == 0 or step % every:
        return "no"
    return "left out" if writing else "write"


def last_write_s(nbytes: int, longest_s: float) -> float:
    """Seconds that the last checkpoint may take, of ``nbytes`` of all ranks; ``longest_s``: what
    the slowest so far took, 0 where there was none. By weight it is never less, for who counts may
    have begun a moment ago, and have seen none of the slow ones. Pure."""
    foretold = max(SHOWN_TIMES * longest_s, nbytes / LEAST_WRITE_RATE)
    return min(max(WRITE_TIMEOUT_S, foretold), MOST_WRITE_S)


class CheckpointWriter:
    """The thread and what it has to do."""

    def __init__(self, job_dir: Path) -> None:
        self.longest_s = 0.0
        """What the slowest write so far took; of those that came to a file."""
        self._job_dir = job_dir
        self._queue = PoliteQueue[_Write]("checkpoint writer", self._write)

    @property
    def busy(self) -> bool:
        """Whether a state is being written, or waits for it."""
        return bool(self._queue.pending())

    def write(self, key: SnapshotKey, payload: Payload, digest: str, told: Told) -> None:
        """Have a state written; returns at once. ``payload`` stays as it is until ``told``."""
        self._queue.put(_Write(key, payload, digest, told))

    def drop_after(self, step: int) -> list[Told]:
        """Give up what waits of later steps; whom nobody will tell."""
        return [write.told for write in self._queue.take_back(lambda w: w.key.step > step)]

    def wait(self, timeout_s: float) -> bool:
        """Wait until everything was told; False if it wasn't by then."""
        return self._queue.wait(timeout_s)

    def close(self) -> None:
        """End the thread after the file it is at; the rest is given up."""
        self._queue.close()

    def _write(self, write: _Write) -> None:
        began = time.monotonic()
        try:
            found: Path | Exception = write_rank_file(
                self._job_dir, write.key, write.payload, write.digest
            )
        except Exception as error:  # noqa: BLE001 - a checkpoint less is told, never fatal
            found = error
        else:
            self.longest_s = max(self.longest_s, time.monotonic() - began)
        write.told(found)
