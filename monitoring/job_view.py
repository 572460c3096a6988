"""A job as its readers see it: the summary, the report, the terminal view and W&B.

Promises: a ``JobView`` is a plain value made of stored records, whoever stored them; it
round-trips through strict JSON. Incidents, actions and events are the stored rows
(``Incident.to_json()`` and the like), so that a reader of an older job still works.

Which steps count: a rollback or a restart runs some step numbers again. ``kept`` are the
records that led to the present state, ``abandoned`` those that a later record replaced, or that a
decision gave up which no record has followed yet (the job may have been paused or have ended then).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from monitoring.records import Incident, StepRecord

Row = Mapping[str, Any]

GOES_BACK = frozenset({"rollback", "layer_fallback", "whole_bf16", "lower_lr", "restart"})
"""Action kinds after which an earlier step is run again."""


@dataclass(frozen=True, slots=True)
class JobView:
    """Everything known of one job at one moment."""

    job: str
    state: str
    """Word of the job's state, as ``running``."""
    spec: Row
    """The completed spec, as JSON."""
    steps: Sequence[StepRecord] = ()
    """In the order in which they were recorded, abandoned ones included."""
    incidents: Sequence[Row] = ()
    actions: Sequence[Row] = ()
    events: Sequence[Row] = ()
    extra: Row = field(default_factory=dict)
    """What the owner of the job adds, as its directory."""

    def to_json(self) -> dict[str, Any]:
        return {
            "job": self.job,
            "state": self.state,
            "spec": dict(self.spec),
            "steps": [step.to_json() for step in self.steps],
            "incidents": [dict(row) for row in self.incidents],
            "actions": [dict(row) for row in self.actions],
            "events": [dict(row) for row in self.events],
            "extra": dict(self.extra),
        }

    @classmethod
    def from_json(cls, row: Row) -> JobView:
        return cls(
            job=row["job"],
            state=row["state"],
            spec=row["spec"],
            steps=tuple(StepRecord.from_json(step) for step in row.get("steps", ())),
            incidents=tuple(row.get("incidents", ())),
            actions=tuple(row.get("actions", ())),
            events=tuple(row.get("events", ())),
            extra=row.get("extra", {}),
        )

    def section(self, *names: str) -> Any:
        """A part of the spec by its path, None where it says nothing."""
        value: Any = self.spec
        for name in names:
            if not isinstance(value, Mapping):
                return None
            value = value.get(name)
        return value

    def parsed_incidents(self) -> list[Incident]:
        """The incidents as values, oldest first."""
        return [Incident.from_json(row) for row in self.incidents]


@dataclass(frozen=True, slots=True)
class Landing:
    """Where an action that goes back took the state from."""

    step: int
    tier: str
    """``ring``: each rank's own memory, without a restart; ``memory``: a keeper's copy;
    ``disk``: a checkpoint; ``seed``: from the beginning."""


def landing(view: JobView, action: Row) -> Landing | None:
    """Where ``action`` went back to; None where it didn't, or its attempt hasn't started yet.

    A restart is stored before its copies are looked at, so the place is in the event with
    which the next attempt began.
    """
    if action["kind"] not in GOES_BACK:
        return None
    if action["kind"] != "restart" and action.get("in_place", True):
        return Landing(int(action["to_step"]), "ring")
    for event in view.events:
        detail = event.get("detail", {})
        started = event["kind"] == "attempt_started" and "tier" in detail
        if started and detail.get("attempt") == int(action["attempt"]) + 1:
            return Landing(int(detail["step"]), str(detail["tier"]))
    return None


def goes_on_at(view: JobView) -> int | None:
    """The step that the newest decision to go back leads to, where no record has followed it."""
    back = next((a for a in reversed(view.actions) if a.get("to_step") is not None), None)
    if back is None:
        return None
    mark = (int(back["attempt"]), int(back["timeline"]))
    for record in view.steps[-1:]:
        newest = (record.attempt, record.timeline)
        # A reader that catches up knows of what was decided later.
        if newest > mark or (newest == mark and record.step < int(back["step"])):
            return None
    return int(back["to_step"])


def split_steps(view: JobView) -> tuple[list[StepRecord], list[StepRecord]]:
    """(kept, abandoned) of a job as it stands now, each in recorded order."""
    kept, abandoned = split_timelines(view.steps)
    if (going_on := goes_on_at(view)) is not None:
        abandoned += [record for record in kept if record.step >= going_on]
        kept = [record for record in kept if record.step < going_on]
    return kept, abandoned


def split_timelines(steps: Sequence[StepRecord]) -> tuple[list[StepRecord], list[StepRecord]]:
    """(kept, abandoned), each in recorded order; ``kept`` has rising step numbers.

    A record that goes back to step s abandons what was kept from s on.
    """
    kept: list[StepRecord] = []
    abandoned: list[StepRecord] = []
    for record in steps:
        undone: list[StepRecord] = []
        while kept and kept[-1].step >= record.step:
            undone.append(kept.pop())
        abandoned.extend(reversed(undone))
        kept.append(record)
    return kept, abandoned
