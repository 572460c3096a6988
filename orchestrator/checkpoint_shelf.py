"""The job's checkpoints as the supervisor handles them: commit what all ranks wrote, list.

Promises: a disk that is full or broken is told, never raised: training goes on.
"""

from __future__ import annotations

import logging
from pathlib import Path

from launch.checkpoints import IncompleteCheckpointError, commit_checkpoint, list_checkpoints
from launch.commands import RestorePoint, SnapshotReport

logger = logging.getLogger(__name__)


class CheckpointShelf:
    """Checkpoints of one job; files of the present attempt that wait for other ranks."""

    def __init__(self, job_dir: Path | str, num_to_keep: int, world_size: int) -> None:
        self._job_dir = Path(job_dir)
        self._num_to_keep = num_to_keep
        self._world_size = world_size
        self._written: dict[tuple[int, int, int], set[int]] = {}
        self.failed: tuple[int, str] | None = None
        """The newest step that could not be committed, and why."""

    def add(self, report: SnapshotReport) -> bool:
        """Note a rank's file; True when it was the last one and the step can be committed."""
        key = (report.attempt, report.timeline, report.step)
        self._written.setdefault(key, set()).add(report.rank)
        return len(self._written[key]) == self._world_size

    def waiting(self) -> bool:
        """Whether some ranks have written a step that others have not."""
        return bool(self._written)

    def forget(self) -> None:
        """Files of a branch that was given up are never completed."""
        self._written.clear()

    def commit(self, report: SnapshotReport) -> str:
        """Make the step a checkpoint; "" when it is one, else what went wrong."""
        self._written.pop((report.attempt, report.timeline, report.step), None)
        try:
            commit_checkpoint(
                self._job_dir,
                report.step,
                report.attempt,
                range(self._world_size),
                timeline=report.timeline,
                num_to_keep=self._num_to_keep,
            )
        except (IncompleteCheckpointError, OSError) as error:
            logger.warning("checkpoint of step %d: %s", report.step, error)
            self.failed = (report.step, f"no checkpoint of step {report.step}: {error}")
            return str(error)
        return ""

    def points(self) -> list[RestorePoint]:
        """What an attempt could start from; contents are checked by whoever loads them."""
        return [
            RestorePoint(c.step, "disk", c.attempt, c.timeline, str(c.path))
            for c in list_checkpoints(self._job_dir)
            if set(c.files) == set(range(self._world_size))
        ]
