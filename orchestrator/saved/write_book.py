"""Which ranks have said what became of their file of a step, until all have. Pure.

Promises: ranks are counted, not reports; what is over is over: a report that comes again, or late,
changes nothing of it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from orchestrator.saved.restore import Made

MOST_OVER = 64
"""Steps remembered to be over."""


class WrittenStep(NamedTuple):
    """A step that ranks write; also where its files are."""

    attempt: int
    timeline: int
    step: int


@dataclass(slots=True)
class Writing:
    """How far a step is."""

    said: set[int] = field(default_factory=set)
    """Ranks that have told what became of their file."""
    lost: bool = False
    """It won't be a checkpoint: some rank has no file, or the job went back from it."""


def written_step(made: Made) -> WrittenStep:
    """That a report is of."""
    return WrittenStep(made.attempt, made.timeline, made.step)


class WriteBook:
    """Steps of one job that are being written."""

    def __init__(self) -> None:
        self._open: dict[WrittenStep, Writing] = {}
        self._over: dict[WrittenStep, None] = {}

    def open(self, step: WrittenStep) -> Writing | None:
        """What is known of it, from its first report on; None: it is over."""
        return None if step in self._over else self._open.setdefault(step, Writing())

    def close(self, step: WrittenStep) -> list[WrittenStep]:
        """It is a checkpoint, or its files are given back. Returns what is over with it: earlier
        ones of its attempt that were lost, though some rank never said so.

        A rank writes one after the other, so that none of them writes to those any more.
        """
        lost = [
            other
            for other, writing in self._open.items()
            if writing.lost and other.attempt == step.attempt and other < step
        ]
        for over in (*lost, step):
            self._open.pop(over, None)
            self._over[over] = None
        while len(self._over) > MOST_OVER:
            del self._over[next(iter(self._over))]
        return lost

    def awaited(self) -> dict[WrittenStep, Writing]:
        """Those that may still become checkpoints."""
        return {step: writing for step, writing in self._open.items() if not writing.lost}

    def clear(self) -> None:
        """Another attempt begins, or the ranks are others."""
        self._open.clear()
        self._over.clear()
