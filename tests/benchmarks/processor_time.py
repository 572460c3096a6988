"""Processor time that a side's processes take, by what they are.

    with ProcessorMeter() as meter:
        run = under_torchrun(spec, folder)
    meter.between(begin, end)        # {"rank": 41.2, "raylet": 0.2}

Where no core is free, this is what a side costs; a step's time says the same with more chance in
it. Promises: all that is started within, daemons too, is counted, what ended by what it had taken
when it was last seen; looking costs every side the same few milliseconds each ``EVERY_S``.
"""

from __future__ import annotations

import bisect
import itertools
import os
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

import psutil

from tests.benchmarks.peers.processes import MARK, new_mark, of_mark

EVERY_S = 4.0
RANKS = ("ray::Worker.run", "plain_deepspeed.py", "ray::RayTrainWorker")
"""Titles and scripts of the processes that train."""
RANK = "rank"


@dataclass(frozen=True, slots=True)
class Sample:
    """What had been taken by ``time``."""

    time: float
    """Seconds since the epoch."""
    taken: Mapping[str, float]
    """Kind of process → seconds of a core, since each began."""


class ProcessorMeter:
    """Marks what is started within, and looks at it until the end."""

    def __init__(self) -> None:
        self._samples: list[Sample] = []
        self._seen: dict[tuple[int, float], tuple[str, float]] = {}
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="processor", daemon=True)
        self._before: str | None = None
        self._mark = ""

    def __enter__(self) -> ProcessorMeter:
        self._before = os.environ.get(MARK)
        self._mark = os.environ[MARK] = new_mark()
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stop.set()
        self._thread.join()
        if self._before is None:
            del os.environ[MARK]
        else:
            os.environ[MARK] = self._before

    def look(self) -> None:
        """Take a sample now."""
        for process in of_mark(self._mark):
            try:
                times, key = process.cpu_times(), (process.pid, process.create_time())
                # A process of Ray's is told what it is after it has started.
                self._seen[key] = kind_of(process.cmdline()), times.user + times.system
            except psutil.Error:
                continue
        taken: dict[str, float] = {}
        for kind, seconds in self._seen.values():
            taken[kind] = taken.get(kind, 0.0) + seconds
        self._samples.append(Sample(time.time(), taken))

    def between(self, begin: float, end: float) -> dict[str, float]:
        """``taken_between`` of its samples."""
        return taken_between(self._samples, begin, end)

    def _run(self) -> None:
        self.look()
        while not self._stop.wait(EVERY_S):
            self.look()


def kind_of(command: Sequence[str]) -> str:
    """What a command line is of: a rank, a role of Ray's, a program."""
    if not command:
        return "unknown"
    if any(known in part for part in command[:4] for known in RANKS):
        return RANK
    title = command[0].split()[0] if command[0] else "unknown"
    if title.startswith("ray::"):
        return title.removeprefix("ray::").partition(".")[0]
    program = Path(title).name
    if not program.startswith("python"):
        return program
    script = next((part for part in command[1:] if not part.startswith("-")), program)
    return Path(script).name


def taken_between(samples: Sequence[Sample], begin: float, end: float) -> dict[str, float]:
    """Kind → seconds of a core from ``begin`` to ``end``, seconds since the epoch; between samples
    and beyond the last two, in proportion to time. Nothing where there are fewer than two."""
    if len(samples) < 2:
        return {}
    first, last = _taken_by(samples, begin), _taken_by(samples, end)
    grown = {kind: seconds - first.get(kind, 0.0) for kind, seconds in last.items()}
    return {kind: max(0.0, seconds) for kind, seconds in grown.items()}


def _taken_by(samples: Sequence[Sample], moment: float) -> dict[str, float]:
    later = bisect.bisect(samples, moment, key=lambda sample: sample.time)
    later = min(max(later, 1), len(samples) - 1)
    before, after = samples[later - 1], samples[later]
    share = (moment - before.time) / (after.time - before.time)
    kinds = dict.fromkeys(itertools.chain(before.taken, after.taken))
    return {
        kind: (1 - share) * before.taken.get(kind, 0.0) + share * after.taken.get(kind, 0.0)
        for kind in kinds
    }
