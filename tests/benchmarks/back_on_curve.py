"""When a run whose training was disturbed is back on the undisturbed curve. Pure.

    within = tolerance(undisturbed, first=175)        # from how far seeds lie apart
    verdict = judge(executed, curve, onset=175, within=within)
    verdict.steps, verdict.seconds, verdict.lost, verdict.final

A run's *kept* losses are, by step, those that led to its end: of a step that was done several
times the last one. Its *height* at step s is the mean of the ``WINDOW`` kept losses that begin
there, minus the same mean of the side's own undisturbed run; a loss that isn't finite, or isn't
there, leaves no height. The run is back *at* the first step s, from the fault's on, from which
``HOLD`` heights in a row are ``within`` or lower, if it doesn't leave after that: ``HOLD`` heights
in a row that aren't, or the last one, send it off again. Windows look ahead, so that a spike takes
none of the healthy steps behind it along; being better than the curve is no trouble.

What it took is counted in what was executed, not in step numbers: from the first time that the
fault's step was done up to, not including, the time that s was done and kept.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

WINDOW = 10
HOLD = 10
LAST = 20
"""Steps at the end whose mean is the final loss."""
LEAST = 0.02
"""Share of the loss that seeds are taken to lie apart by at least; all there is of one seed."""

Curve = Mapping[int, float]
"""Step → loss, nats a token."""


@dataclass(frozen=True, slots=True)
class Executed:
    """One step as it was done, once or once more."""

    step: int
    loss: float
    end: float
    """Seconds since the epoch."""
    applied: bool = True
    """Whether it changed the weights."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """What a fault cost one run."""

    steps: int | None
    """Executed until the run was back on the curve; 0: it never left. None: it never came back."""
    seconds: float | None
    """From the beginning of the fault's step to the end of the first one that is back on the
    curve, so that nothing amiss takes one step's time."""
    lost: int
    """Steps done again, or whose update was left out, in the whole run."""
    final: float | None
    """How much higher the final loss is, as a fraction; None: the run has none."""


def kept(executed: Sequence[Executed]) -> list[int]:
    """Indices of the executions that led to the end, steps rising: one that goes back to step s
    gives up what was kept from s on."""
    found: list[int] = []
    for index, done in enumerate(executed):
        while found and executed[found[-1]].step >= done.step:
            found.pop()
        found.append(index)
    return found


def curve_of(executed: Sequence[Executed]) -> dict[int, float]:
    """The kept losses."""
    return {executed[index].step: executed[index].loss for index in kept(executed)}


def mean_from(curve: Curve, step: int, window: int = WINDOW) -> float:
    """Mean of the ``window`` losses from ``step`` on; NaN where one is missing or not finite."""
    losses = [curve.get(at, math.nan) for at in range(step, step + window)]
    return statistics.fmean(losses) if all(map(math.isfinite, losses)) else math.nan


def tolerance(sides: Mapping[str, Sequence[Curve]], first: int, window: int = WINDOW) -> float:
    """Nats by which a run may lie above its curve: how far seeds alone lead apart.

    ``sides``: each one's undisturbed curves, one a seed. Of a side it is the farthest that two of
    them lie from each other at any step from ``first`` on, so that no seed's own run would be
    called off another's curve; then the median over the sides, one limit for all, and at least
    ``LEAST`` of the loss. Raises ValueError where no side has a whole curve.
    """
    apart: list[float] = []
    heights: list[float] = []
    for curves in sides.values():
        last = max((max(curve, default=-1) for curve in curves), default=-1) - window + 1
        means = [[mean_from(c, at, window) for at in range(first, last + 1)] for c in curves]
        whole = [of for of in means if of and all(map(math.isfinite, of))]
        if not whole:
            continue
        heights.append(statistics.fmean(itertools.chain(*whole)))
        apart.append(max(max(at) - min(at) for at in zip(*whole, strict=True)))
    if not apart:
        raise ValueError(f"no side has an undisturbed curve of {window} steps from {first} on")
    return max(statistics.median(apart), LEAST * statistics.median(heights))


def back_at(
    losses: Curve,
    curve: Curve,
    *,
    onset: int,
    within: float,
    window: int = WINDOW,
    hold: int = HOLD,
) -> int | None:
    """First step from ``onset`` on at which ``losses`` are on ``curve`` again for ``hold`` steps,
    after which they don't leave it for as many, nor at their end; None: there is none."""
    back: int | None = None
    on = off = 0
    for step in range(onset, max(losses, default=-1) - window + 2):
        height = mean_from(losses, step, window) - mean_from(curve, step, window)
        is_on = height <= within  # NaN is not
        on, off = (on + 1, 0) if is_on else (0, off + 1)
        if on == hold and back is None:
            back = step - hold + 1
        if off == hold:
            back = None
    return None if off else back


def final_loss(curve: Curve, steps: int, last: int = LAST) -> float:
    """Mean of the ``last`` of ``steps`` steps; NaN where one is missing or not finite."""
    return mean_from(curve, steps - last, last)


def judge(
    executed: Sequence[Executed],
    curve: Curve,
    *,
    onset: int,
    steps: int,
    within: float,
    window: int = WINDOW,
    hold: int = HOLD,
) -> Verdict:
    """The verdict on a run of ``steps`` steps with a fault at ``onset``, against ``curve``.

    ``executed`` is in the order of time and holds the step before ``onset``.
    """
    indices = kept(executed)
    losses = curve_of(executed)
    left_out = sum(not executed[index].applied for index in indices)
    lost = len(executed) - len(indices) + left_out
    ratio = final_loss(losses, steps) / final_loss(curve, steps) - 1.0
    final = ratio if math.isfinite(ratio) else None
    back = back_at(losses, curve, onset=onset, within=within, window=window, hold=hold)
    first = next((i for i, done in enumerate(executed) if done.step == onset), None)
    if back is None or first is None:
        return Verdict(None, None, lost, final)
    at = next(index for index in indices if executed[index].step == back)
    # A fault's step may have been undone and its replacement be good at once.
    took = at - first
    seconds = executed[at].end - executed[first - 1].end
    return Verdict(took, seconds, lost, final)
