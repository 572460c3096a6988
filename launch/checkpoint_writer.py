"""A rank's checkpoint files on their way to disk, by a thread of their own.

A disk may take longer than a keeper by far, and must hold up nothing: neither training, nor the
copies in memory. Promises: what is written stays leased until it is; no more than one state is
written and one waits, for who asks first looks at ``busy``; what became of each is told.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from launch.background import PoliteQueue
from launch.checkpoints import write_rank_file
from launch.digests import Payload
from launch.snapshots import SnapshotKey

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


class CheckpointWriter:
    """The thread and what it has to do."""

    def __init__(self, job_dir: Path) -> None:
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
        try:
            found: Path | Exception = write_rank_file(
                self._job_dir, write.key, write.payload, write.digest
            )
        except Exception as error:  # noqa: BLE001 - a checkpoint less is told, never fatal
            found = error
        write.told(found)
