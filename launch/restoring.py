"""How the ranks of an attempt come to the state that they start from, all at the same step.

Every rank looks for its copy of a point in its node's keeper, then in its partners', or on disk.
Then all show each other what they found: where one has no usable copy, all go on to the next
point, which is older. So a copy that is damaged or missing costs no attempt. Promises: nothing
is loaded that isn't what was written; what was passed over is told, once a copy; every rank
raises the same error where nothing is left.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch import Tensor

from launch.commands import Assignment, CopyRefused, Report, RestoredOlder, RestorePoint
from launch.process_group import gather
from launch.reshaping import state_on_disk
from launch.snapshots import (
    DamagedSnapshotError,
    MismatchedSnapshotError,
    MissingSnapshotError,
    SnapshotError,
    SnapshotKey,
    SnapshotSource,
    UnreadSnapshotError,
    refuse_damaged,
)
from launch.state_block import unpack
from launch.state_header import LAYOUT
from parallel.layout import RankLayout

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Found:
    """A rank's state, checked and not yet loaded."""

    point: RestorePoint
    meta: Mapping[str, Any]
    tensors: Mapping[str, Tensor]
    """By name; they share the copy's memory."""


class Restorer:
    """The search of one rank; a collective, as every rank makes it."""

    def __init__(
        self,
        assignment: Assignment,
        sources: Sequence[tuple[str, SnapshotSource]],
        world: dist.ProcessGroup,
        send: Callable[[Report], None],
        layout: RankLayout,
        live: Mapping[str, Tensor],
    ) -> None:
        """``sources``: keepers with their tier, ``memory`` or ``partner``, the nearest first;
        ``layout``: what of the model the state is to hold, in tensors such as the ``live`` ones.

        A state in memory must be of that layout, one on disk may be of ranks of other degrees.
        """
        self._assignment = assignment
        self._sources = sources
        self._world = world
        self._send = send
        self._layout = layout
        self._live = live

    def find(self) -> Found | None:
        """The state of the best point that every rank has a copy of; None: start from the seed.

        Raises SnapshotError, on every rank that of the first rank without a copy, when ranks
        have no point in common.
        """
        first = self._assignment.restore
        if first is None:
            return None
        missing: SnapshotError | None = None
        for number, point in enumerate((first, *self._assignment.fallbacks)):
            found = self._copy_of(point)
            missing = self._missing(found if isinstance(found, SnapshotError) else None)
            if missing is None:
                assert isinstance(found, Found)
                if number > 0:
                    self._tell_older(point)
                return found
            logger.warning("not from step %d: %s", point.step, missing)
        assert missing is not None, "there was a point"
        raise missing

    def _copy_of(self, point: RestorePoint) -> Found | SnapshotError:
        """This rank's copy, or what is wrong with the last one it could have had."""
        error: SnapshotError | None = None
        ways = self._ways(point)
        lost = True
        for number, (tier, fetch) in enumerate(ways):
            try:
                return fetch()
            except SnapshotError as refused:
                lost = lost and not isinstance(refused, UnreadSnapshotError)
                # A keeper doesn't know whose partner it is.
                error = type(refused)(refused.rank, refused.step, tier, refused.detail)
            except Exception as unreachable:  # noqa: BLE001 - whatever became of the keeper
                # It may answer the next attempt.
                lost = False
                why = f"{type(unreachable).__name__}: {unreachable}".splitlines()[0]
                error = MissingSnapshotError(self._assignment.rank, point.step, tier, why)
            self._tell(tier, error, point if lost and number == len(ways) - 1 else None)
        if error is None:
            error = self._nowhere(point)
            self._tell(point.tier, error, point)
        return error

    def _ways(self, point: RestorePoint) -> list[tuple[str, Callable[[], Found]]]:
        if point.tier == "disk":
            return [("disk", lambda: self._on_disk(point))]
        sources = self._sources
        return [(t, lambda t=t, s=s: self._in_memory(point, t, s)) for t, s in sources]  # type: ignore[misc]

    def _on_disk(self, point: RestorePoint) -> Found:
        rank = self._assignment.rank
        state = state_on_disk(point.path, rank, point.step, self._layout, self._live)
        return Found(point, *state)

    def _in_memory(self, point: RestorePoint, tier: str, source: SnapshotSource) -> Found:
        rank, step = self._assignment.rank, point.step
        key = SnapshotKey(self._assignment.job, point.attempt, point.timeline, rank, step)
        stored = source.get(key)
        if stored is None:
            raise MissingSnapshotError(rank, step, tier, "the keeper doesn't hold it")
        refuse_damaged(stored, rank, step, tier)
        try:
            meta, tensors = unpack(stored.payload)
        except ValueError as error:
            raise DamagedSnapshotError(rank, step, tier, str(error)) from error
        if meta.get(LAYOUT) != self._layout.to_json():
            raise MismatchedSnapshotError(rank, step, tier, "it is of ranks of other degrees")
        if meta.get("step") != step:
            raise DamagedSnapshotError(rank, step, tier, f"it holds step {meta.get('step')}")
        return Found(point, meta, tensors)

    def _nowhere(self, point: RestorePoint) -> SnapshotError:
        rank = self._assignment.rank
        return MissingSnapshotError(rank, point.step, point.tier, "no keeper holds it")

    def _missing(self, mine: SnapshotError | None) -> SnapshotError | None:
        """What the first rank without a copy said; None: every rank has one."""
        said = gather(self._world, mine)
        return next((error for error in said if error is not None), None)

    def _tell(self, tier: Any, error: SnapshotError, point: RestorePoint | None) -> None:
        a = self._assignment
        logger.warning("a copy is passed over: %s", error)
        told = (a.attempt, a.timeline, a.rank, error.step, tier, error.detail)
        self._send(CopyRefused(*told, point))

    def _tell_older(self, point: RestorePoint) -> None:
        a = self._assignment
        if a.rank == 0:
            self._send(RestoredOlder(a.attempt, a.timeline, a.rank, point.step, point))
