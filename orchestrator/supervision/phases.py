"""Where an attempt stands, and what exists in each of its phases alone.

Promises: a phase has what belongs to it and nothing else, so that an attempt that trains can't
have an end that it waits for.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import ClassVar

from orchestrator.supervision.ending import Ending


class Phase(Enum):
    """Where an attempt stands."""

    LAUNCHING = "launching"
    """Workers do their imports."""
    TRAINING = "training"
    """Ranks are given out."""
    STOPPING = "stopping"
    """Ranks were told to stop."""
    OVER = "over"


@dataclass(frozen=True, slots=True)
class Launching:
    """Workers start; the attempt has no ranks."""

    phase: ClassVar[Phase] = Phase.LAUNCHING


@dataclass(frozen=True, slots=True)
class Training:
    """The attempt has ranks."""

    phase: ClassVar[Phase] = Phase.TRAINING


@dataclass(frozen=True, slots=True)
class Stopping:
    """The ranks end after a checkpoint."""

    phase: ClassVar[Phase] = Phase.STOPPING
    ending: Ending


@dataclass(frozen=True, slots=True)
class Over:
    """The job has no attempt any more, or another supervisor has it."""

    phase: ClassVar[Phase] = Phase.OVER


Standing = Launching | Training | Stopping | Over
