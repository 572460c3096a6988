"""Where the attempts of one job may start from: what keepers and disk hold, less what is damaged.

Promises: a copy that a rank found damaged is never offered again; the ranks of an attempt get
all that is left, best first, so that what is damaged costs them no attempt.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from pathlib import Path

from launch.checkpoint_files import is_absent
from launch.commands import CopyRefused, RestorePoint
from launch.rank_group import RankEnd, RankGroup
from launch.snapshots import SnapshotError, UnreadSnapshotError
from orchestrator.actions import Action
from orchestrator.saved.checkpoint_shelf import CheckpointShelf
from orchestrator.saved.restore import candidates, on_living_branch, points_in_memory
from orchestrator.saved.resume_from import (
    FOREIGN_ATTEMPT,
    KEY,
    UNREADABLE,
    ControlState,
    control_state,
    foreign_points,
    resumed,
)
from orchestrator.spec.job import JobSpec
from orchestrator.supervision.attempt_state import AttemptState

logger = logging.getLogger(__name__)


class StartingPoints:
    """Of the job that a supervisor has."""

    def __init__(
        self, group: RankGroup, shelf: CheckpointShelf, spec: JobSpec, world_size: int
    ) -> None:
        self._group = group
        self._shelf = shelf
        self._spec = spec
        self._reach = spec.snapshots.every * spec.snapshots.keep
        self._world_size = world_size
        self._since = 0
        self._refused: set[RestorePoint] = set()
        self._foreign: dict[RestorePoint, ControlState] = {}
        self._unusable: dict[str, str] = {}
        """Why not, of checkpoints by their folder."""
        self._news: list[tuple[Path, str]] = []
        self._unseen: dict[Path, str] = {}
        """Of other jobs' folders, what the storage said instead when they were last looked at."""

    def resize(self, world_size: int, attempt: int) -> None:
        """From ``attempt`` on the ranks are more or fewer: copies in memory of those before fit
        none of them, checkpoints do."""
        self._world_size, self._since = world_size, attempt

    def choose(self, attempt: AttemptState) -> tuple[RestorePoint, ...]:
        """Note in ``attempt`` where its ranks start; all that they may start from, best first.

        From here on no earlier attempt changes what is on disk. Raises FencedError where a later
        one has it.
        """
        self._shelf.begin(attempt.facts.attempt)
        found = candidates(
            self._in_memory() + self._shelf.points(),
            attempt.facts.actions,
            self._refused,
            recorded=attempt.facts.step,
            reach=self._reach,
        )
        found += self._from_other_jobs()
        attempt.restore, attempt.fallbacks = (found[0], found[1:]) if found else (None, ())
        if found and found[0].attempt == FOREIGN_ATTEMPT:
            self._shelf.reads(found[0].path, attempt.resume.job)
            # What came before was recorded, elsewhere.
            attempt.facts.step = max(attempt.facts.step, found[0].step - 1)
        return found

    def unseen(self, found: Sequence[RestorePoint]) -> str:
        """Why another job's folder may hold a later state than any of ``found``; empty where it
        says what it holds."""
        best = max((point.step for point in found), default=-1)
        later = (
            f"{folder} can't be looked at: {why}"
            for folder, why in self._unseen.items()
            if best < 0 or _step_of(folder) > best
        )
        return next(later, "")

    def unheard(self, found: Sequence[RestorePoint], recorded: int) -> Sequence[str]:
        """Keepers that may hold what ``found`` lacks of a job that did step ``recorded`` last: any
        state that it made, or one of its last snapshots."""
        best, every = newest_own(found), self._spec.snapshots.every
        # The newest may have been on its way yet; the one before it is whole, as a rule.
        enough = best is not None and best >= (recorded + 1) // every * every - every
        return () if enough else self._group.silent()

    def lost(self, found: Sequence[RestorePoint], written: int) -> str:
        """Why ranks must not start from ``found``: they would train from the beginning what was
        trained and saved. Empty where they may; ``written``: the newest checkpoint's step."""
        if written and all(point.attempt == FOREIGN_ATTEMPT for point in found):
            return (
                f"a checkpoint of step {written} was written, and none that can be used is in "
                f"{self._shelf.folder} now (is its storage there?)"
            )
        path = self._spec.checkpoint.resume_from
        if path is not None and not found:
            why = "; ".join(dict.fromkeys(self._unusable.values())) or "it holds none that is whole"
            return f"{KEY} is {path}, which no rank can start from: {why}"
        return ""

    def take_over(self, attempt: AttemptState, now: float) -> Action | None:
        """What comes along with another job's state, once in a job's life; to be stored."""
        point, facts = attempt.restore, attempt.facts
        state = None if point is None else self._foreign.get(point)
        if state is None or any(action.kind == "resumed" for action in facts.actions):
            return None
        assert point is not None
        return resumed(state, point.path, facts.history(now, ()), self._spec)

    def steps(self, actions: Iterable[Action]) -> set[int]:
        """Steps that another attempt could start from."""
        return self._usable(self._in_memory(), actions) | self.steps_on_disk(actions)

    def steps_on_disk(self, actions: Iterable[Action]) -> set[int]:
        """Those of them that survive every node."""
        return self._usable(self._shelf.points(), actions)

    def passed_over(self, report: CopyRefused) -> None:
        """A rank can't use a copy; without another one of that step nobody starts there."""
        if report.point is not None:
            self._refused.add(report.point)
            self._unusable[report.point.path] = f"rank {report.rank}: {report.error}"

    def left_out(self) -> list[tuple[Path, str]]:
        """Checkpoints that are none, found since this was last asked, and why; those that can't
        be looked at are none for whoever waits for them no longer."""
        for folder, why in self._unseen.items():
            self._leave_out(folder, f"it can't be looked at: {why}")
        news, self._news = self._news, []
        return [*self._shelf.left_out(), *news]

    def refuse(self, cause: RankEnd, attempt: AttemptState) -> RestorePoint | None:
        """The point whose copy is why a rank ended; left out from now on. None: it was not why."""
        error = cause.cause
        if attempt.restore is None or not isinstance(error, SnapshotError):
            return None
        if isinstance(error, UnreadSnapshotError):
            return None  # the next attempt waits for its storage
        points = (attempt.restore, *attempt.fallbacks)
        about = [p for p in points if p.step == error.step and _tier(error.tier) == p.tier]
        self._refused.update(about)
        self._unusable |= {point.path: str(error) for point in about}
        return about[0] if about else None

    def _in_memory(self) -> list[RestorePoint]:
        copies = [key for key in self._group.copies() if key.attempt >= self._since]
        return points_in_memory(copies, self._world_size)

    def _from_other_jobs(self) -> tuple[RestorePoint, ...]:
        """By the spec, those of them that can say what they were trained with."""
        self._unseen = {}
        for point in foreign_points(self._spec, self._leave_out, self._cannot_see):
            if point in self._refused or point in self._foreign:
                continue
            try:
                self._foreign[point] = control_state(point.path)
            except UNREADABLE as error:
                if isinstance(error, OSError) and not is_absent(error):
                    self._cannot_see(Path(point.path), error)
                else:
                    self._leave_out(Path(point.path), str(error))
        return tuple(point for point in self._foreign if point not in self._refused)

    def _cannot_see(self, folder: Path, error: OSError) -> None:
        self._unseen[folder] = error.strerror or str(error)

    def _leave_out(self, folder: Path, why: str) -> None:
        """Another job's, or a folder that should be one; told once."""
        if str(folder) not in self._unusable:
            logger.warning("not from %s: %s", folder, why)
            self._news.append((folder, why))
        self._unusable[str(folder)] = f"{folder}: {why}"

    def _usable(self, points: Sequence[RestorePoint], actions: Iterable[Action]) -> set[int]:
        """Steps of those that are on this branch and weren't found damaged."""
        actions = list(actions)
        return {p.step for p in points if p not in self._refused and on_living_branch(p, actions)}


def newest_own(points: Iterable[RestorePoint]) -> int | None:
    """The newest step of those that this job has made."""
    return max((p.step for p in points if p.attempt != FOREIGN_ATTEMPT), default=None)


def _step_of(folder: Path) -> int:
    """Of a checkpoint by its folder's name; -1 for any other folder."""
    told = folder.name.removeprefix("step-")
    return int(told) if told.isdecimal() and told != folder.name else -1


def _tier(found_in: str) -> str:
    """The tier of a point whose copy was in ``found_in``."""
    return "memory" if found_in == "partner" else found_in
