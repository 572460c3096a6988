"""What the recorded steps of a run with a killed rank come to. Pure.

    verdict = judge(ends, fault, world=2, steps=240, how="finished")
    verdict.outage_s, verdict.redone, verdict.outcome

A step is *done* when a rank has recorded its end before the fault. One more counts as done: the
step that the killed rank had in flight, where another rank still finished it at its usual pace, so
that nobody's recovery is credited with it. *New* is a step whose number isn't among those.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from tests.benchmarks.peers.recorded import StepEnd

HowEnded = Literal["finished", "exited", "stalled"]
"""It ended by itself and well; ended by itself otherwise; was ended, for want of a new step."""
Outcome = Literal["recovered", "undisturbed", "hang", "failed"]
IN_FLIGHT = 1.5
"""Usual steps that a step may last, from the end of the one before, and be the one in flight."""


@dataclass(frozen=True, slots=True)
class Fault:
    """A SIGKILL."""

    time: float
    """Seconds since the epoch, taken right before the signal."""
    rank: int
    pid: int


@dataclass(frozen=True, slots=True)
class Verdict:
    """One run."""

    outcome: Outcome
    outage_s: float | None
    """From the fault to the end of the first new step, of whichever rank; None: there was none."""
    whole_s: float | None
    """To the first new step that every rank ended, which is later where survivors go on alone."""
    again_s: float | None
    """To the end of the first step, done before or new: without what is done again because of how
    long ago the state was kept."""
    redone: int
    """Steps done before the fault and once more after it."""
    alone: int
    """New steps that fewer ranks than all recorded: their batches were smaller."""


def judge(
    ends: Sequence[StepEnd], fault: Fault | None, *, world: int, steps: int, how: HowEnded
) -> Verdict:
    """The verdict on one run of ``steps`` steps on ``world`` ranks that ended as ``how`` says."""
    finished = how == "finished" and any(end.step == steps - 1 for end in ends)
    if fault is None:
        outcome: Outcome = "undisturbed" if finished else _unfinished(how)
        return Verdict(outcome, None, None, None, 0, 0)
    done, after = _split(ends, fault)
    new: dict[int, dict[int, float]] = defaultdict(dict)
    for end in after:
        if end.step not in done:
            new[end.step].setdefault(end.rank, end.time)
    whole = [max(ranks.values()) for ranks in new.values() if len(ranks) == world]
    firsts = [min(ranks.values()) for ranks in new.values()]
    return Verdict(
        outcome="recovered" if finished else _unfinished(how),
        outage_s=min(firsts) - fault.time if firsts else None,
        whole_s=min(whole) - fault.time if whole else None,
        again_s=min(end.time for end in after) - fault.time if after else None,
        redone=len({end.step for end in after} & done),
        alone=sum(len(ranks) < world for ranks in new.values()),
    )


def losses(ends: Iterable[StepEnd]) -> dict[int, float]:
    """Loss of each step, from 0: the mean over the ranks that have one, of each its last record."""
    newest: dict[int, dict[int, float]] = defaultdict(dict)
    for end in ends:
        if not math.isnan(end.loss):
            newest[end.step][end.rank] = end.loss
    return {step: statistics.fmean(of.values()) for step, of in sorted(newest.items())}


def step_seconds(ends: Iterable[StepEnd]) -> float | None:
    """Mean seconds between the ends of successive steps of the first rank, in the second half of
    what it did; None of fewer than two."""
    times = [end.time for end in sorted(ends, key=lambda end: end.time) if end.rank == 0]
    settled = times[len(times) // 2 :]
    if len(settled) < 2:
        return None
    return (settled[-1] - settled[0]) / (len(settled) - 1)


def final_difference(
    found: Mapping[int, float], undisturbed: Mapping[int, float], last: int = 10
) -> float | None:
    """How much higher the mean loss of the ``last`` steps is, as a fraction; None: they're not all
    in both."""
    if not undisturbed:
        return None
    tail = range(max(undisturbed) + 1 - last, max(undisturbed) + 1)
    if not all(step in found and step in undisturbed for step in tail):
        return None
    own, other = (statistics.fmean(of[step] for step in tail) for of in (found, undisturbed))
    return own / other - 1.0


def _unfinished(how: HowEnded) -> Outcome:
    return "hang" if how == "stalled" else "failed"


def _split(ends: Sequence[StepEnd], fault: Fault) -> tuple[set[int], list[StepEnd]]:
    """Numbers of the steps that were done, and what was recorded after the fault but for the one
    in flight."""
    before = [end for end in ends if end.time <= fault.time]
    done = {end.step for end in before}
    last = {end.pid: end for end in before}
    killed = last.get(fault.pid)
    usual = _usual_step_s(before)
    after = []
    for end in ends:
        if end.time <= fault.time:
            continue
        previous = last.get(end.pid)
        in_flight = (
            previous is not None
            and killed is not None
            and end.step == previous.step + 1
            and end.step in (killed.step, killed.step + 1)
            and end.time - previous.time <= IN_FLIGHT * usual
        )
        if in_flight:
            done.add(end.step)
        else:
            after.append(end)
    return done, after


def _usual_step_s(before: Sequence[StepEnd]) -> float:
    times: dict[int, list[float]] = defaultdict(list)
    for end in before:
        times[end.pid].append(end.time)
    gaps = [b - a for of in times.values() for a, b in itertools.pairwise(of)]
    return statistics.median(gaps) if gaps else 0.0
