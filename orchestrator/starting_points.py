"""Where the attempts of one job may start from: what keepers and disk hold, less what is damaged.

Promises: a copy that a rank found damaged is never offered again; the ranks of an attempt get
all that is left, best first, so that what is damaged costs them no attempt.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from launch.commands import CopyRefused, RestorePoint
from launch.config import SnapshotConfig
from launch.rank_group import RankEnd, RankGroup
from launch.snapshots import SnapshotError
from orchestrator.actions import Action
from orchestrator.attempt_state import AttemptState
from orchestrator.checkpoint_shelf import CheckpointShelf
from orchestrator.restore import candidates, on_living_branch, points_in_memory


class StartingPoints:
    """Of the job that a supervisor has."""

    def __init__(
        self, group: RankGroup, shelf: CheckpointShelf, snapshots: SnapshotConfig, world_size: int
    ) -> None:
        self._group = group
        self._shelf = shelf
        self._reach = snapshots.every * snapshots.keep
        self._world_size = world_size
        self._refused: set[RestorePoint] = set()

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
        attempt.restore, attempt.fallbacks = (found[0], found[1:]) if found else (None, ())
        return found

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

    def refuse(self, cause: RankEnd, attempt: AttemptState) -> RestorePoint | None:
        """The point whose copy is why a rank ended; left out from now on. None: it was not why."""
        error = cause.cause
        if attempt.restore is None or not isinstance(error, SnapshotError):
            return None
        points = (attempt.restore, *attempt.fallbacks)
        about = [p for p in points if p.step == error.step and _tier(error.tier) == p.tier]
        self._refused.update(about)
        return about[0] if about else None

    def _in_memory(self) -> list[RestorePoint]:
        return points_in_memory(self._group.copies(), self._world_size)

    def _usable(self, points: Sequence[RestorePoint], actions: Iterable[Action]) -> set[int]:
        """Steps of those that are on this branch and weren't found damaged."""
        actions = list(actions)
        return {p.step for p in points if p not in self._refused and on_living_branch(p, actions)}


def _tier(found_in: str) -> str:
    """The tier of a point whose copy was in ``found_in``."""
    return "memory" if found_in == "partner" else found_in
