"""A rank's checkpoint files on their way to disk, by a thread of their own.

A disk may take longer than a keeper by far, and must hold up nothing: neither training, nor the
copies in memory. Promises: what is written stays leased until it is; no more than one state is
written and one waits, for who asks first looks at ``busy``; what became of each is told.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from launch.background import yield_to_training
from launch.checkpoints import write_rank_file
from launch.snapshots import Payload, SnapshotKey

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
        self._waiting: deque[_Write] = deque()
        self._writing = False
        self._closed = False
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._run, name="checkpoint writer", daemon=True)
        self._thread.start()

    @property
    def busy(self) -> bool:
        """Whether a state is being written, or waits for it."""
        return self._writing or bool(self._waiting)

    def write(self, key: SnapshotKey, payload: Payload, digest: str, told: Told) -> None:
        """Have a state written; returns at once. ``payload`` stays as it is until ``told``."""
        with self._changed:
            self._waiting.append(_Write(key, payload, digest, told))
            self._changed.notify_all()

    def drop_after(self, step: int) -> list[Told]:
        """Give up what waits of later steps; whom nobody will tell."""
        with self._changed:
            dropped = [write for write in self._waiting if write.key.step > step]
            self._waiting = deque(write for write in self._waiting if write.key.step <= step)
            self._changed.notify_all()
        return [write.told for write in dropped]

    def wait(self, timeout_s: float) -> bool:
        """Wait until everything was told; False if it wasn't by then."""
        with self._changed:
            return self._changed.wait_for(lambda: not self.busy, timeout_s)

    def close(self) -> None:
        """End the thread after the file it is at; the rest is given up."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def _run(self) -> None:
        yield_to_training()
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting or self._closed)
                if self._closed:
                    return
                write = self._waiting.popleft()
                self._writing = True
            try:
                found: Path | Exception = write_rank_file(
                    self._job_dir, write.key, write.payload, write.digest
                )
            except Exception as error:  # noqa: BLE001 - a checkpoint less is told, never fatal
                found = error
            try:
                write.told(found)
            finally:
                with self._changed:
                    self._writing = False
                    self._changed.notify_all()
