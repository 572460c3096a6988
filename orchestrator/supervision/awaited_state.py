"""Who may hold a newer state than an attempt could start from, and doesn't answer: keepers that are
slow, a storage that is away.

Promises: a wait is told once an attempt; where there is something at hand it lasts no longer than
it would take to train again what it may spare.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from launch.commands import RestorePoint
from orchestrator.events import Notice
from orchestrator.saved.checkpoint_shelf import STORAGE_S
from orchestrator.supervision import notices
from orchestrator.supervision.job_in_hand import JobInHand
from orchestrator.supervision.starting_points import newest_own

LOOK_S = 1.0
"""Seconds between two looks at a storage that doesn't say what it holds."""


@dataclass(frozen=True, slots=True)
class _Wait:
    """One that is under way, or was the attempt's."""

    attempt: int
    since: float
    looked: float


class AwaitedState:
    """What the starts of one job's attempts wait for, before their ranks are given out."""

    def __init__(self, job: JobInHand) -> None:
        self._job = job
        self._keepers: _Wait | None = None
        self._storage: _Wait | None = None

    def rests(self, now: float) -> bool:
        """Whether the storage was looked at a moment ago."""
        return self._storage is not None and now - self._storage.looked < LOOK_S

    def holds_up(self, points: Sequence[RestorePoint], asked: float, now: float) -> bool:
        """Whether an attempt that could start from ``points`` is to wait yet. ``asked``: when
        these were looked for; a job that has trained nothing waits for nobody but the storage that
        it is to begin from."""
        job = self._job
        trained = job.attempt.resume.step >= 0
        if trained and self._for_keepers(points, asked):
            return True
        why, most_s = self._own_unseen(points) if trained else ("", 0.0)
        if not why and newest_own(points) is None and not job.journal.newest_checkpoint():
            why, most_s = job.starts.unseen(points), STORAGE_S
        return self._for_storage(why, most_s, now)

    def _for_keepers(self, points: Sequence[RestorePoint], asked: float) -> bool:
        """Where they hold all there is, for as long as an attempt may take to its first step; else
        with time left for the start."""
        job, attempt = self._job, self._job.attempt
        keepers = job.starts.unheard(points, attempt.facts.step)
        if not keepers:
            return False
        now, best = job.clock(), newest_own(points)
        wait = self._of_this_attempt(self._keepers, asked)
        if best is None:
            # What they take is the attempt's own time, which ``held_up`` will give it otherwise.
            attempt.held_up(asked - now)
        else:
            most_s = min(self._train_again_s(best), job.spec.recovery.init_timeout_s / 2)
            if now - wait.since >= most_s:
                return False
        if wait is not self._keepers:
            self._tell(notices.keepers_awaited(keepers, best))
        self._keepers = wait
        return True

    def _own_unseen(self, points: Sequence[RestorePoint]) -> tuple[str, float]:
        """Why the job's own storage may hold a later checkpoint than all that is at hand, empty
        where it does not, and the seconds that this is worth."""
        job = self._job
        best, written = newest_own(points), job.journal.newest_checkpoint()
        if best is None:
            return job.shelf.unseen, STORAGE_S
        why = job.shelf.unseen if best < max(0, written) else ""
        return why, min(STORAGE_S, self._train_again_s(best, written - 1))

    def _for_storage(self, why: str, most_s: float, now: float) -> bool:
        """``why`` it doesn't say what it holds; empty: it does, or nobody needs to know."""
        if not why:
            self._storage = None
            return False
        wait = self._of_this_attempt(self._storage, now)
        if wait is not self._storage:
            self._tell(notices.storage_awaited(why, most_s))
        # What the storage takes is no time of the ranks.
        self._job.attempt.held_up(now - wait.looked)
        self._storage = _Wait(wait.attempt, wait.since, now)
        return now - wait.since < most_s

    def _of_this_attempt(self, wait: _Wait | None, now: float) -> _Wait:
        number = self._job.attempt.facts.attempt
        return wait if wait is not None and wait.attempt == number else _Wait(number, now, now)

    def _train_again_s(self, best: int, last: int | None = None) -> float:
        """Seconds that the steps from ``best`` to ``last``, by default the newest, would take."""
        newest = self._job.attempt.facts.step if last is None else last
        return (newest + 1 - best) * self._job.journal.step_time_s()

    def _tell(self, notice: Notice) -> None:
        self._job.journal.happened(notice, self._job.clock())
