"""How long ranks may take to stop, their last checkpoint included. No I/O; time is an argument.

Promises: it follows from what the state weighs and from how long its checkpoints took so far, as
the job's ranks report; beside two steps it is ``LEAST_STOP_S`` at least, and ``END_TIMEOUT_S`` at
most unless checkpoints took longer; ranks of which no word comes are given less, for they may hang.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from launch.checkpoint_writer import (
    LEAST_WRITE_RATE,
    MOST_WRITE_S,
    SHOWN_TIMES,
    WRITE_TIMEOUT_S,
    last_write_s,
)
from launch.commands import SnapshotReport
from orchestrator.planning.told import size

END_MARGIN_S = 30.0
"""Seconds beside the last checkpoint that ranks may take to end: those that give up say why."""
END_TIMEOUT_S = WRITE_TIMEOUT_S + END_MARGIN_S
LEAST_STOP_S = 45.0
"""Seconds that a stop is given at least."""
LEAST_SEAL_RATE = 200e6
"""Bytes a second at which a rank copies and hashes its own, at least; it sends word then."""
SHOWN = 8
"""Checkpoints whose times are kept."""
MOST_OPEN = 64
"""Snapshots that may still be written; what became of older ones is not measured."""


@dataclass(frozen=True, slots=True)
class StopTime:
    """What ranks are given for one stop, in seconds from its command on."""

    silent_s: float
    """Until the first word of theirs."""
    most_s: float
    nbytes: int | None = None
    """What the checkpoint weighs; None: nobody has told yet."""

    @property
    def what_for(self) -> str:
        """``a checkpoint of 12.3 GB``."""
        return "a checkpoint" + ("" if self.nbytes is None else f" of {size(self.nbytes)}")

    def late(self, waited_s: float, *, heard: bool) -> str:
        """Why nobody waits any longer; empty while somebody does. ``heard``: whether any word of
        the ranks came since their command."""
        if not heard and waited_s > self.silent_s:
            return f"no word of the ranks in the {self.silent_s:.0f} s after they were told to stop"
        if waited_s > self.most_s:
            return f"the ranks did not stop in the {self.most_s:.0f} s given for {self.what_for}"
        return ""


class Saves:
    """What the saves of one job weigh and take, over all its attempts."""

    def __init__(self) -> None:
        self._attempt = 0
        self._nbytes = 0
        """Of the largest rank's state; 0: nobody has told yet."""
        self._sealed: dict[tuple[int, int, int], float] = {}
        self._took: dict[tuple[int, int, int], float] = {}
        self._cut_off_s = 0.0

    def sealed(self, report: SnapshotReport, now: float) -> None:
        """A rank has a snapshot in its memory, and begins to write it where it is due."""
        if report.attempt != self._attempt:
            # Its ranks may be more or fewer.
            self._attempt, self._nbytes = report.attempt, 0
        self._nbytes = max(self._nbytes, report.nbytes)
        self._sealed.setdefault(_key(report), now)
        _keep(self._sealed, MOST_OPEN)

    def written(self, report: SnapshotReport, now: float) -> None:
        """A rank's file is on disk."""
        if (since := self._sealed.get(_key(report))) is not None:
            self._took[_key(report)] = now - since
            _keep(self._took, SHOWN)

    def cut_off(self, seconds: float) -> None:
        """A stop was given up while its ranks wrote: the next one is given more."""
        self._cut_off_s = max(self._cut_off_s, seconds)

    def stop_time(self, world_size: int, step_times: Sequence[float]) -> StopTime:
        """For a stop now; ``step_times``: seconds of the attempt's newest steps."""
        # The command may come too late for the end of the step that runs.
        steps_s = 2 * max(step_times, default=0.0)
        if not self._nbytes:
            return StopTime(steps_s + LEAST_STOP_S, steps_s + END_TIMEOUT_S)
        nbytes = self._nbytes * world_size
        shown_s = min(LEAST_STOP_S + SHOWN_TIMES * self._longest_s, MOST_WRITE_S)
        writes_s = min(LEAST_STOP_S + nbytes / LEAST_WRITE_RATE, END_TIMEOUT_S)
        seals_s = LEAST_STOP_S + self._nbytes / LEAST_SEAL_RATE
        return StopTime(
            steps_s + min(seals_s, END_TIMEOUT_S), steps_s + max(writes_s, shown_s), nbytes
        )

    def end_time(self, world_size: int) -> float:
        """Seconds that ranks may take to end after the last step, their checkpoint included. Where
        earlier ones have shown how long that takes, what it weighs counts no more: a storage that
        hangs holds the nodes for as long."""
        nbytes = 0 if self._longest_s else self._nbytes * world_size
        return END_MARGIN_S + last_write_s(nbytes, self._longest_s)

    @property
    def _longest_s(self) -> float:
        """What the slowest of the newest saves took."""
        return max(self._cut_off_s, *self._took.values(), 0.0)


def _key(report: SnapshotReport) -> tuple[int, int, int]:
    return (report.attempt, report.timeline, report.step)


def _keep(newest: dict[tuple[int, int, int], float], most: int) -> None:
    while len(newest) > most:
        del newest[next(iter(newest))]
