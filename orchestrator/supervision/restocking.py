"""When idle workers for the next restart are asked for, and on which nodes. Ray-free.

Promises: they come once the attempt is on new ground, for their imports take the cores of steps
that are done again; the nodes that stand ready for the job have theirs like the nodes that train.
"""

from __future__ import annotations

from collections.abc import Sequence

from launch.rank_group import RankGroup
from orchestrator.node_slot import NodeSlot
from orchestrator.protocol import ResumeState
from orchestrator.supervision.attempt import seats_of


class Restocking:
    """The idle workers of one job; one attempt at a time."""

    def __init__(self, group: RankGroup, wanted: bool) -> None:
        """``wanted``: the spec's ``resources.standby``."""
        self._group = group
        self._wanted = wanted
        self._spares: tuple[NodeSlot, ...] = ()
        self._filled: tuple[NodeSlot, ...] | None = None
        """Spares that were last asked for; None: nothing in this attempt."""

    def begin(self, resume: ResumeState) -> None:
        """An attempt has started, and may have taken idle workers."""
        self._job = resume.job
        self._spares, self._filled = resume.spares, None

    def stand_ready(self, spares: Sequence[NodeSlot]) -> None:
        """These are the job's spares from now on; called from any thread."""
        self._spares = tuple(spares)

    def turn(self, on_new_ground: bool) -> None:
        """Ask for what is missing, once it is time."""
        spares = self._spares
        if self._wanted and on_new_ground and spares != self._filled:
            self._filled = spares
            self._group.fill_standby(seats_of(self._job, spares))
