"""What one pass of the controller has read, for all that it then does."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from orchestrator.recovery.controls import Control
from orchestrator.store.rows import JobRow


@dataclass(frozen=True, slots=True)
class Seen:
    """The jobs, and what people ask of them."""

    now: float
    """Seconds since the epoch."""
    holding: Sequence[JobRow]
    """Jobs that held nodes when the pass began."""
    queued: Sequence[JobRow]
    """Jobs that waited for their nodes then."""
    asked: Mapping[str, Sequence[Control]]
    """What waits for an answer, by job, oldest first."""
    version: int
    """Another one once something has changed of the jobs that placement depends on."""


Act = Callable[[JobRow, Seen], bool]
"""What a pass does with a job; whether that moved it."""
