"""The drills of a job, as one rank fires them.

Promises: a drill is told to the supervisor before it fires; a rank is killed only when
that was received, so that a restart can't meet the same drill again. What a drill does
follows from (spec, step) and, where it lasts, from the timeline in which it began.
"""

from __future__ import annotations

import logging
import math
import os
import signal
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

from launch.drills.batches import Tokens, disturbed
from launch.drills.config import (
    AmaxOutlier,
    BitFlip,
    Drill,
    FrozenScale,
    KillRank,
    LabelNoise,
    LRShock,
    NonFiniteGradient,
    PoisonedBatch,
    SwigluGrowth,
    WeightSurge,
    duration,
)

logger = logging.getLogger(__name__)


class Target(Protocol):
    """What drills do to a model (``parallel.faults.Faults``), on all ranks but where it says."""

    def check_linear(self, tensor: str) -> None:
        """Raise ValueError, on every rank alike, unless some rank has this FP8 operand."""

    def check_layer(self, layer: int) -> None:
        """Raise ValueError, on every rank alike, for an MLP that can't be grown."""

    def check_parameter(self, name: str) -> None:
        """Raise ValueError, on every rank alike, for a parameter that no rank has."""

    def surge_mlp(self, layer: int, factor: float) -> None:
        """Multiply the MLP weights of one layer, where this rank has them."""

    def grow_channel(self, layer: int, factor: float) -> None:
        """Multiply one inner channel of a layer's MLP, and undo it behind."""

    def add_outlier(self, tensor: str, factor: float) -> None:
        """A huge value in an operand of a linear, in the next step."""

    def flip_bit(self, parameter: str, replica: int, bit: int) -> None:
        """Flip a bit of a parameter on one replica."""

    def freeze_scale(self, tensor: str, factor: float) -> None:
        """Let no update reach a delayed scale until it is thawed."""

    def thaw_scale(self, tensor: str) -> None:
        """End that; safe to repeat."""

    def poison_gradient(self, value: float) -> None:
        """Put ``value`` into a gradient of this rank's next step."""


def kill_this_process() -> None:
    """SIGKILL: no handler, no goodbye."""
    os.kill(os.getpid(), signal.SIGKILL)


def check_target(drills: Sequence[Drill], target: Target) -> None:
    """Raise ValueError, on every rank alike, for a drill that this model has no place for.

    The spec's check knows the built-in model's; this is for a user's own.
    """
    for index, drill in enumerate(drills):
        try:
            if isinstance(drill, AmaxOutlier | FrozenScale):
                target.check_linear(drill.tensor)
            elif isinstance(drill, SwigluGrowth):
                target.check_layer(drill.layer)
            elif isinstance(drill, BitFlip):
                target.check_parameter(drill.parameter)
        except ValueError as error:
            raise ValueError(f"drills[{index}]: {error}") from None


@dataclass(frozen=True, slots=True)
class _Running:
    """A drill that lasts, under way."""

    drill: Drill
    timeline: int
    """In which it began, and with which it ends."""
    end: int
    """First step past it."""


class Drills:
    """The drills of a job on one rank."""

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
        self._running: dict[int, _Running] = {}

    def fire(self, step: int, *, timeline: int, batch: int) -> tuple[int, ...]:
        """Fire what is due before ``step``; the indices of the drills that began on this rank.

        ``batch`` is what the step trains on. All ranks call it at every step, so that none
        begins again after a rollback.
        """
        for index, running in list(self._running.items()):
            if running.timeline != timeline or step >= running.end:
                del self._running[index]
                if isinstance(running.drill, FrozenScale):
                    self._target.thaw_scale(running.drill.tensor)
        began = []
        for index, drill in enumerate(self._drills):
            if index in self._fired or not _is_due(drill, step, batch):
                continue
            self._fired.add(index)
            if isinstance(drill, LabelNoise | LRShock | FrozenScale | SwigluGrowth):
                self._running[index] = _Running(drill, timeline, drill.step + duration(drill))
            if not isinstance(drill, NonFiniteGradient | KillRank) or drill.rank == self._rank:
                self._begin(index, drill, step)
                began.append(index)
        for running in self._running.values():
            if isinstance(running.drill, SwigluGrowth):
                self._target.grow_channel(running.drill.layer, running.drill.factor)
        return tuple(began)

    @property
    def lr_factor(self) -> float:
        """Of the learning rate in the step that was fired for."""
        return math.prod(
            running.drill.factor
            for running in self._running.values()
            if isinstance(running.drill, LRShock)
        )

    def change_of(self, batch: int) -> Callable[[int, Tokens], tuple[Tokens, Tokens]] | None:
        """What makes inputs and targets of ``batch``'s sequences, by position; None: nothing
        special. Call it after ``fire``."""
        poison = next(
            (d for d in self._drills if isinstance(d, PoisonedBatch) and d.poisons(batch)), None
        )
        noises = [
            (index, running.drill)
            for index, running in self._running.items()
            if isinstance(running.drill, LabelNoise)
        ]
        if poison is None and not noises:
            return None
        return partial(disturbed, poison=poison, noises=noises)

    def _begin(self, index: int, drill: Drill, step: int) -> None:
        received = self._announce(index, step)
        logger.warning("drill %d at step %d: %r", index, step, drill)
        target = self._target
        # Replicas must stay equal: what happens on all of them does, received or not.
        match drill:
            case WeightSurge():
                target.surge_mlp(drill.layer, drill.factor)
            case AmaxOutlier():
                target.add_outlier(drill.tensor, drill.factor)
            case NonFiniteGradient():
                target.poison_gradient(float(drill.value))
            case BitFlip():
                target.flip_bit(drill.parameter, drill.replica, drill.bit)
            case FrozenScale():
                target.freeze_scale(drill.tensor, drill.factor)
            case KillRank() if received:
                self._kill()
            case KillRank():
                logger.warning("drill %d is left out: the supervisor was not told", index)
            case _:
                pass  # what lasts is looked up in every step


def _is_due(drill: Drill, step: int, batch: int) -> bool:
    return drill.poisons(batch) if isinstance(drill, PoisonedBatch) else drill.step == step
