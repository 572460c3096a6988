"""The job's checkpoints as the supervisor handles them: commit what all ranks wrote, list.

Promises: a storage that is full, broken or away is told, never raised: training goes on, what a
checkpoint took that won't be completed is given back, and the next one is tried. What can't be
looked at is never taken for what isn't there. No pass waits for files to be deleted.
"""

from __future__ import annotations

import errno
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from launch.attempt_folder import AttemptOverError, attempt_is_open, open_attempt
from launch.checkpoint_files import is_absent
from launch.checkpoint_manifest import Checkpoint
from launch.checkpoints import (
    IncompleteCheckpointError,
    checkpoint_folder,
    commit_checkpoint,
    discard_step,
    hold,
    let_go,
    list_checkpoints,
    verify_checkpoint,
)
from launch.commands import CopyFailed, RestorePoint, SnapshotReport
from orchestrator.actions import Action
from orchestrator.instant import Instant
from orchestrator.protocol import FencedError
from orchestrator.saved.restore import on_living_branch
from orchestrator.saved.undertaker import Undertaker
from orchestrator.saved.write_book import WriteBook, Writing, WrittenStep, written_step

STORAGE_S = 300.0
"""Seconds that a storage which fails, or can't be looked at, is waited for where work would be lost
otherwise."""

AGAIN_S = 5.0
"""Seconds between two tries of a storage that fails: to open it, to make a checkpoint of what is
written. They begin when the try is over, which may itself take longer."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Uncommitted:
    """A step that all ranks have written, while the storage fails to make it a checkpoint."""

    report: SnapshotReport
    since: float
    tried: float
    """When the newest try was over."""
    why: str


class CheckpointShelf:
    """Checkpoints of one job; files of the present attempt that wait for other ranks."""

    def __init__(
        self,
        job_dir: Path | str,
        num_to_keep: int,
        world_size: int,
        run: Mapping[str, Any] | None = None,
        clock: Callable[[], float] = Instant.now,
    ) -> None:
        """``run`` goes into each manifest."""
        self._clock = clock
        self._job_dir = Path(job_dir)
        self._num_to_keep = num_to_keep
        self._world_size = world_size
        self._run = dict(run or {})
        self._held: tuple[str, str] | None = None
        self._attempt = 0
        self._open = False
        self._book = WriteBook()
        self._undertaker = Undertaker(self._job_dir)
        self._rolled_back: list[int] = []
        self._uncommitted: dict[WrittenStep, _Uncommitted] = {}
        self._newest: RestorePoint | None = None
        self._damaged: dict[Path, str] = {}
        self._news: list[tuple[Path, str]] = []
        self.failed: tuple[int, str] | None = None
        """The step that could not be written last, and why; None once another one was since."""
        self.unseen = ""
        """Why what ``points`` gave last may not be all; empty: it is."""
        self.unopened = ""
        """Why nothing can be written now; empty: it can."""
        self._looked = 0.0
        """When the newest try was over that left it unopened."""

    @property
    def folder(self) -> Path:
        """Where they are."""
        return self._job_dir / "checkpoints"

    def begin(self, attempt: int) -> None:
        """Take the disk over for an attempt, before its ranks are given out.

        Raises FencedError when a later one has it. A disk that fails is tried again with the
        next checkpoint.
        """
        self._attempt, self._open = attempt, False
        self.forget()
        self._try_to_open()

    def take_over(self, attempt: int) -> None:
        """``begin``, unless that is done."""
        if self._attempt != attempt:
            self.begin(attempt)

    def reopen(self) -> None:
        """What could not be opened is tried again, after a while. Raises FencedError."""
        if self.unopened and self._clock() - self._looked >= AGAIN_S:
            self._try_to_open()

    def resize(self, world_size: int, run: Mapping[str, Any]) -> None:
        """The ranks of the next attempt are more or fewer."""
        self._world_size, self._run = world_size, dict(run)

    def reads(self, path: str, job: str) -> None:
        """The attempt's ranks read another job's checkpoint; it is kept until one is committed."""
        hold(path, job)
        self._held = (path, job)

    def add(self, report: SnapshotReport, actions: Iterable[Action] = ()) -> bool:
        """Note a rank's file; True when it was the last one and the step can be committed.

        ``actions`` of the job say whether it has gone back from that step.
        """
        writing = self._book.open(written_step(report))
        if writing is None:
            return False
        if not writing.lost and not on_living_branch(report, actions):
            writing.lost = True
            self._rolled_back.append(report.step)
        return self._said(report, writing)

    def lose(self, report: CopyFailed) -> None:
        """A rank has no file of a step, so that the others' are of no use. Raises FencedError."""
        if report.tier not in ("ring", "disk"):
            return
        writing = self._book.open(written_step(report))
        if writing is None:
            return
        if not writing.lost:
            writing.lost = True
            if report.tier == "disk" and not report.left_out:
                why = f"no checkpoint of step {report.step}: {report.error}"
                self.failed = (report.step, why)
            # Once a step, for thousands of ranks may say the same of it.
            self._try_to_open()
        self._said(report, writing)

    def _said(self, report: SnapshotReport | CopyFailed, writing: Writing) -> bool:
        """Whether all ranks have a file of that step. What is lost is given back once none of them
        writes to it any more: it isn't taken away under those that do."""
        writing.said.add(report.rank)
        if len(writing.said) < self._world_size:
            return False
        if writing.lost:
            self._give_back(written_step(report))
        return not writing.lost

    def waiting(self) -> bool:
        """Whether some ranks have written a step that others have not."""
        return bool(self._book.awaited())

    def go_back(self, actions: Iterable[Action]) -> None:
        """The newest of ``actions`` went back: what is being written of later steps is lost, of
        earlier ones it may become a checkpoint all the same."""
        actions = tuple(actions)
        for step, writing in self._book.awaited().items():
            if not on_living_branch(step, actions):
                writing.lost = True
                self._rolled_back.append(step.step)
                if self._uncommitted.pop(step, None) is not None:
                    self._give_back(step)

    def rolled_back(self) -> list[int]:
        """Steps that were being written, and are lost to a way back, since this was last asked."""
        told, self._rolled_back = self._rolled_back, []
        return told

    def forget(self) -> None:
        """Files of an attempt that is over are never completed."""
        self._book.clear()
        self._uncommitted.clear()

    def commit(self, report: SnapshotReport, actions: Iterable[Action] = ()) -> str:
        """Make the step a checkpoint; "" when it is one, else what went wrong.

        ``actions`` of the job say which checkpoints aren't of use to it any more.
        """
        try:
            self._commit(report, tuple(actions))
        except (IncompleteCheckpointError, AttemptOverError, OSError) as error:
            return self._not_made(report, error)
        return ""

    def commit_in_time(
        self, report: SnapshotReport, actions: Iterable[Action], now: float
    ) -> str | None:
        """``commit``, but None where the storage fails in a way that may pass: the files, which
        all ranks have written, stay, and ``retry`` makes the checkpoint of them or gives up."""
        step = written_step(report)
        try:
            self._commit(report, tuple(actions))
        except OSError as error:
            since = self._uncommitted[step].since if step in self._uncommitted else now
            if not _may_pass(error) or now - since >= STORAGE_S:
                return self._not_made(report, error)
            logger.warning("checkpoint of step %d isn't made yet: %s", report.step, error)
            self._uncommitted[step] = _Uncommitted(report, since, self._clock(), str(error))
            return None
        except (IncompleteCheckpointError, AttemptOverError) as error:
            return self._not_made(report, error)
        return ""

    def retry(self, actions: Iterable[Action], now: float) -> list[tuple[int, str]]:
        """What came of steps that waited for the storage: each with ``commit``'s answer."""
        told = []
        for waiting in [w for w in self._uncommitted.values() if now - w.tried >= AGAIN_S]:
            answer = self.commit_in_time(waiting.report, actions, now)
            if answer is not None:
                told.append((waiting.report.step, answer))
        return told

    @property
    def works(self) -> bool:
        """Whether the storage has taken and said, the last time, what it was to."""
        return not (self.failed or self.unopened or self.unseen or self.awaits_storage)

    @property
    def awaits_storage(self) -> str:
        """Why the newest step that all ranks have written is no checkpoint yet; empty: it is."""
        newest = max(self._uncommitted, default=None)
        if newest is None:
            return ""
        return f"no checkpoint of step {newest.step}: {self._uncommitted[newest].why}"

    def _commit(self, report: SnapshotReport, actions: Sequence[Action]) -> None:
        step = written_step(report)
        commit_checkpoint(
            self._job_dir,
            report.step,
            report.attempt,
            range(self._world_size),
            timeline=report.timeline,
            num_to_keep=self._num_to_keep,
            run=self._run,
            living=lambda checkpoint: on_living_branch(checkpoint, actions),
        )
        self._uncommitted.pop(step, None)
        self._close(step)
        path = str(checkpoint_folder(self._job_dir, report.step))
        self._newest = RestorePoint(report.step, "disk", report.attempt, report.timeline, path)
        self.failed = None
        if self._held is not None:
            let_go(*self._held)
            self._held = None
        self._bury()

    def _not_made(self, report: SnapshotReport, error: Exception) -> str:
        step = written_step(report)
        logger.warning("checkpoint of step %d: %s", report.step, error)
        self.failed = (report.step, f"no checkpoint of step {report.step}: {error}")
        self._uncommitted.pop(step, None)
        self._give_back(step)
        return str(error)

    def points(self) -> list[RestorePoint]:
        """What an attempt could start from, on any number of ranks.

        Files that are missing or cut off are left out here; whoever loads one checks the rest.
        What the storage doesn't say anything of is left out as well: ``unseen`` is told then.
        """
        before, self.unseen = self.unseen, ""
        found = [
            RestorePoint(c.step, "disk", c.attempt, c.timeline, str(c.path))
            for c in list_checkpoints(
                self._job_dir, left_out=self._leave_out, unseen=self._cannot_see
            )
            if set(c.files) == set(range(len(c.files))) and not self._is_cut_off(c)
        ]
        if self.unseen and self.unseen != before:
            logger.warning("%s", self.unseen)
        return found

    def committed_unseen(self) -> RestorePoint | None:
        """What was committed last, where ``points`` could not look whether it is still there."""
        return self._newest if self.unseen else None

    def left_out(self) -> list[tuple[Path, str]]:
        """Damaged checkpoints that ``points`` has found since this was last asked, and what is
        wrong with each."""
        told, self._news = self._news, []
        return told

    def _leave_out(self, folder: Path, why: str) -> None:
        if self._damaged.get(folder) != why:
            self._damaged[folder] = why
            self._news.append((folder, why))
            logger.warning("checkpoint %s is left out: %s", folder, why)

    def _cannot_see(self, folder: Path, error: OSError) -> None:
        self.unseen = self.unseen or f"{folder} can't be looked at: {error.strerror}"

    def _is_cut_off(self, checkpoint: Checkpoint) -> bool:
        """Or not seen to be whole."""
        try:
            problems = verify_checkpoint(checkpoint, contents=False)
        except OSError as error:
            self._cannot_see(checkpoint.path, error)
            return True
        if problems:
            self._leave_out(checkpoint.path, "; ".join(problems))
        return bool(problems)

    def _try_to_open(self) -> None:
        try:
            # A storage that was away may have come back without what was opened in its place.
            if self._open and attempt_is_open(self._job_dir, self._attempt):
                return
            open_attempt(self._job_dir, self._attempt)
        except AttemptOverError as error:
            raise FencedError(str(error)) from error
        except OSError as error:
            self.unopened, self._looked = str(error), self._clock()
            logger.warning("no checkpoints in %s for now: %s", self._job_dir, error)
        else:
            self._open, self.unopened = True, ""
            self._bury()

    def _give_back(self, step: WrittenStep) -> None:
        self._close(step)
        discard_step(self._job_dir, step.step, step.attempt, step.timeline)
        self._bury()

    def _close(self, step: WrittenStep) -> None:
        for lost in self._book.close(step):
            discard_step(self._job_dir, lost.step, lost.attempt, lost.timeline)

    def _bury(self) -> None:
        self._undertaker.call(self._attempt)


def _may_pass(error: OSError) -> bool:
    """Whether a storage that says so may take in a minute what it refuses now, by itself."""
    return not is_absent(error) and error.errno not in (errno.ENOSPC, errno.EDQUOT)
