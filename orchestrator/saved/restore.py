"""Where the next attempt takes its state from. Pure: choosing, not loading.

Promises: every rank gets the same step; a copy made on a branch that was given up later
is never offered; candidates come best first: the newest step, memory before disk. Whose
memory, the rank's own node's or a partner's, makes no difference here: it is the same state.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, Protocol, get_args

from launch.commands import RestorePoint
from orchestrator.actions import Action, ActionKind

WRITTEN = "checkpoint_written"
"""Kind of the event that tells of a checkpoint."""

WRITTEN_OR_BACK = (WRITTEN, *get_args(ActionKind))
"""Kinds of the events that tell of a checkpoint, or of an action: it may go back."""


class Made(Protocol):
    """A state, by who made it and when: a point, a checkpoint, what a rank says of its copy."""

    @property
    def attempt(self) -> int: ...

    @property
    def timeline(self) -> int: ...

    @property
    def step(self) -> int: ...


class CopyKey(Made, Protocol):
    """What a keeper says of a copy that it holds (``launch.snapshots.SnapshotKey``)."""

    @property
    def rank(self) -> int: ...


def preference(point: RestorePoint) -> tuple[int, bool, int, int]:
    """Sorts the best last."""
    return (point.step, point.tier == "memory", point.attempt, point.timeline)


def on_living_branch(state: Made, actions: Iterable[Action]) -> bool:
    """Whether nothing went back to before ``state`` since it was made."""
    made = (state.attempt, state.timeline)
    return not any(
        action.to_step is not None
        and (action.attempt, action.timeline) >= made
        and state.step > action.to_step
        for action in actions
    )


def points_in_memory(keys: Iterable[CopyKey], world_size: int) -> list[RestorePoint]:
    """Steps of which the keepers hold a copy of every rank, made by one attempt; where they hold
    one of a rank beyond, those who made it were more, and theirs fits none of these."""
    ranks: dict[tuple[int, int, int], set[int]] = {}
    for key in keys:
        ranks.setdefault((key.attempt, key.timeline, key.step), set()).add(key.rank)
    return [
        RestorePoint(step, "memory", attempt, timeline)
        for (attempt, timeline, step), held in ranks.items()
        if held == set(range(world_size))
    ]


def choose(
    points: Sequence[RestorePoint],
    actions: Sequence[Action],
    refused: Collection[RestorePoint] = (),
    *,
    recorded: int | None = None,
    reach: int = 0,
) -> RestorePoint | None:
    """The best point to start from; None: start from the seed.

    ``refused``: points whose restore failed before. ``recorded``: newest step recorded.
    Ranks outlive a lost supervisor for a moment, and copies of steps that nobody recorded
    would leave a gap that no detector has seen: a copy from before the gap is taken
    instead, unless that costs more than ``reach`` steps.
    """
    usable = [p for p in points if p not in refused and on_living_branch(p, actions)]
    newest = max(usable, key=preference, default=None)
    if newest is None or recorded is None:
        return newest
    seen = max((p for p in usable if p.step <= recorded + 1), key=preference, default=None)
    start = seen.step if seen else 0
    return newest if newest.step - start > reach else seen


def newest_written(events: Iterable[Mapping[str, Any]]) -> int:
    """The newest checkpoint that a job's events tell of and that no action went back from since,
    by its step; 0 for none. The events are in the order in which they were stored: clocks differ
    between heads, and are set back."""
    standing: set[int] = {0}
    for event in events:
        detail = event["detail"]
        if event["kind"] == WRITTEN:
            standing.add(int(detail["step"]))
        elif event["kind"] in WRITTEN_OR_BACK and detail.get("to_step") is not None:
            standing = {step for step in standing if step <= detail["to_step"]} | {0}
    return max(standing)


def candidates(
    points: Sequence[RestorePoint],
    actions: Sequence[Action],
    refused: Collection[RestorePoint] = (),
    *,
    recorded: int | None = None,
    reach: int = 0,
) -> tuple[RestorePoint, ...]:
    """``choose``'s answer, then what it would be without that one, and so on; () for the seed.

    Ranks go down this list together where one of them has no usable copy.
    """
    found: list[RestorePoint] = []
    while point := choose(points, actions, {*refused, *found}, recorded=recorded, reach=reach):
        found.append(point)
    return tuple(found)
