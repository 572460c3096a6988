"""Where a job's time went: productive, lost, recovering, waiting. Pure.

Promises: the four add up to the wall time between the job's beginning and the newest moment that is
known of it, whatever the records; no moment is counted twice.

| | what it is |
|---|---|
| productive | steps that led to the present state |
| lost | steps that a rollback or a restart undid |
| recovering | from the last step before a trouble to the first one after what was done of it |
| waiting | the rest: in the queue, starting, paused, and between two steps |

A step's time is its slowest rank's. What lies between two steps is what no rank's step includes:
checkpoints that hold training up, and what the supervisor takes.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal

from monitoring.job_view import GOES_BACK, JobView, split_steps

Use = Literal["productive", "lost", "recovering", "queued", "starting", "paused", "between"]

WAITING: tuple[Use, ...] = ("queued", "starting", "paused", "between")
"""Uses that count as waiting."""
_IDLE = frozenset({"paused", "failed", "cancelled", "succeeded"})
"""States that a job leaves only because somebody resumes it."""


@dataclass(frozen=True, slots=True)
class Span:
    """A stretch of time, in seconds since the epoch, and what it was used for."""

    begin: float
    end: float
    use: Use


@dataclass(frozen=True, slots=True)
class Goodput:
    """A job's wall time by use."""

    spans: tuple[Span, ...]
    """In order, without gaps; neighbours differ in use."""

    @property
    def wall_s(self) -> float:
        return self.spans[-1].end - self.spans[0].begin if self.spans else 0.0

    def seconds(self, *uses: Use) -> float:
        """What was used for one of these."""
        return sum(span.end - span.begin for span in self.spans if span.use in uses)

    @property
    def waiting_s(self) -> float:
        return self.seconds(*WAITING)

    def to_json(self) -> dict[str, Any]:
        """Seconds; ``waiting`` says what for."""
        return {
            "wall_s": self.wall_s,
            "productive_s": self.seconds("productive"),
            "lost_s": self.seconds("lost"),
            "recovering_s": self.seconds("recovering"),
            "waiting_s": self.waiting_s,
            "waiting": {f"{use}_s": self.seconds(use) for use in WAITING},
        }


def goodput(view: JobView) -> Goodput:
    """The accounting of a view, as far as it knows."""
    steps = _steps(view)
    told = [float(event["time"]) for event in view.events]
    begin = min([*told, *(span.begin for span in steps[:1])], default=0.0)
    end = max([*told, *(span.end for span in steps[-1:])], default=begin)
    troubles = _troubles(view, steps, end)
    states = _states(view)
    cuts = sorted({edge for trouble in troubles for edge in trouble} | {time for time, _ in states})
    spans: list[Span] = []
    at = begin
    trained = False
    for step in [*steps, None]:
        until = step.begin if step else end
        for piece in _pieces(at, until, cuts):
            middle = (piece[0] + piece[1]) / 2
            _add(spans, Span(*piece, _idle_use(middle, troubles, states, trained=trained)))
        if step:
            _add(spans, step)
            at, trained = step.end, True
    return Goodput(tuple(spans))


def _steps(view: JobView) -> list[Span]:
    """Steps in the order of time, without overlaps."""
    kept, lost = split_steps(view)
    uses: list[tuple[float, float, Use]] = [(r.time, r.step_time_s, "productive") for r in kept]
    uses += [(r.time, r.step_time_s, "lost") for r in lost]
    spans: list[Span] = []
    for end, seconds, use in sorted(uses):
        begin = end - max(0.0, seconds)
        if spans:
            begin = max(begin, spans[-1].end)
        if end > begin:
            spans.append(Span(begin, end, use))
    return spans


def _troubles(view: JobView, steps: Sequence[Span], end: float) -> list[tuple[float, float]]:
    """From the last step before each action that goes back to the first step after it."""
    order = sorted(view.steps, key=lambda record: record.time)
    times = [record.time for record in order]
    found: list[tuple[float, float]] = []
    for action in view.actions:
        if action["kind"] not in GOES_BACK:
            continue
        decided = float(action["time"])
        seen = [float(incident["time"]) for incident in action.get("incidents", ())]
        mark = (int(action["attempt"]), int(action["timeline"]))
        after = (
            record.time - record.step_time_s
            for record in order[bisect.bisect_right(times, decided) :]
            if (record.attempt, record.timeline) > mark
        )
        # Who was lost was lost before it was noticed: since the step that came last.
        noticed = min([decided, *seen])
        last = bisect.bisect_right(times, noticed) - 1
        begun = times[last] if last >= 0 else noticed
        found.append((begun, max(begun, next(after, end))))
    return found


def _states(view: JobView) -> list[tuple[float, str]]:
    """(since, state), as far as events tell."""
    return sorted(
        (float(event["time"]), str(detail["to"]))
        for event in view.events
        if event["kind"] == "state" and "to" in (detail := event.get("detail") or {})
    )


def _idle_use(
    moment: float,
    troubles: Sequence[tuple[float, float]],
    states: Sequence[tuple[float, str]],
    *,
    trained: bool,
) -> Use:
    """What a moment without a step was used for."""
    at = bisect.bisect_right(states, moment, key=lambda state: state[0]) - 1
    state = states[at][1] if at >= 0 else "queued" if states else ""
    # A job that lost its nodes, or waits for a person, doesn't recover meanwhile.
    if state in _IDLE:
        return "paused"
    if state == "queued":
        return "queued"
    if any(begin <= moment < end for begin, end in troubles):
        return "recovering"
    if state == "starting" or not trained:
        return "starting"
    return "between"


def _pieces(begin: float, end: float, cuts: Sequence[float]) -> Iterator[tuple[float, float]]:
    """[begin, end) in pieces that no cut lies within."""
    if end <= begin:
        return
    inner = cuts[bisect.bisect_right(cuts, begin) : bisect.bisect_left(cuts, end)]
    yield from pairwise([begin, *inner, end])


def _add(spans: list[Span], span: Span) -> None:
    if spans and spans[-1].use == span.use:
        spans[-1] = Span(spans[-1].begin, span.end, span.use)
    else:
        spans.append(span)
