"""Faults rehearsed on purpose: the spec's ``drills``, each once in a job's life.

Promises: a drill is told to the supervisor before it fires; a rank is killed only when
that was received, so that a restart can't meet the same drill again.
"""

from __future__ import annotations

import logging
import os
import signal
from collections.abc import Callable, Sequence
from typing import Protocol

from launch.config import Drill, KillRank, NonFiniteGradient, WeightSurge

logger = logging.getLogger(__name__)


class Target(Protocol):
    """What a drill does to an engine."""

    def surge_mlp(self, layer: int, factor: float) -> None:
        """Multiply the MLP weights of one layer, where this rank has them."""

    def poison_gradient(self) -> None:
        """Put a NaN into a gradient of this rank's next step."""


def kill_this_process() -> None:
    """SIGKILL: no handler, no goodbye."""
    os.kill(os.getpid(), signal.SIGKILL)


class Drills:
    """The drills of a job, as one rank fires them."""

    def __init__(
        self,
        drills: Sequence[Drill],
        *,
        rank: int,
        fired: Sequence[int],
        target: Target,
        announce: Callable[[int, int], bool],
        kill: Callable[[], None] = kill_this_process,
    ) -> None:
        """``announce(drill, step)`` tells the supervisor and says whether it received that."""
        self._drills = drills
        self._rank = rank
        self._fired = set(fired)
        self._target = target
        self._announce = announce
        self._kill = kill

    def fire(self, step: int) -> tuple[int, ...]:
        """Fire what is due before ``step``; the indices of the drills that this rank fired.

        All ranks call it at every step, so that none fires again after a rollback.
        """
        fired = []
        for index, drill in enumerate(self._drills):
            if drill.step != step or index in self._fired:
                continue
            self._fired.add(index)
            if isinstance(drill, WeightSurge) or drill.rank == self._rank:
                self._act(index, drill, step)
                fired.append(index)
        return tuple(fired)

    def _act(self, index: int, drill: Drill, step: int) -> None:
        received = self._announce(index, step)
        logger.warning("drill %d at step %d: %s", index, step, drill)
        if isinstance(drill, WeightSurge):
            # Replicas must stay equal: it happens on all of them, received or not.
            self._target.surge_mlp(drill.layer, drill.factor)
        elif isinstance(drill, NonFiniteGradient):
            self._target.poison_gradient()
        elif isinstance(drill, KillRank) and received:
            self._kill()
        else:
            logger.warning("drill %d is left out: the supervisor was not told", index)
