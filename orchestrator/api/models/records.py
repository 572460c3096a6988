"""What happens to a job: events, steps, incidents, actions and what was known beside them."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from orchestrator.api.models.fields import FOLLOWED, Number, State, example

_EVENT: dict[str, Any] = {
    "id": 12,
    "job": "toy-1a2b3c",
    "attempt": 1,
    "time": 1796000031.25,
    "kind": "training",
    "message": "Attempt 1 trains; its first step was 0.",
    "detail": {"step": 0},
}
_STEP: dict[str, Any] = {
    "id": 120,
    "attempt": 1,
    "timeline": 0,
    "step": 119,
    "time": 1796000040.5,
    "batch": 119,
    "loss": 2.1875,
    "grad_norm": 0.84,
    "lr": 0.001,
    "tokens": 8192,
    "step_time_s": 0.031,
    "tensors": {},
}
_INCIDENT: dict[str, Any] = {
    "id": 3,
    "kind": "loss_spike",
    "detector": "loss_spike",
    "attempt": 1,
    "timeline": 0,
    "step": 90,
    "onset_step": 90,
    "time": 1796000035.0,
    "message": "The loss of step 90 is 7.3, 41 deviations above its trend.",
    "evidence": {"loss": 7.3},
    "suspects": [],
    "ranks": [],
}
_ACTION: dict[str, Any] = {
    "id": 2,
    "kind": "rollback",
    "attempt": 1,
    "timeline": 0,
    "step": 90,
    "time": 1796000035.0,
    "reason": "Go back to the certified snapshot of step 80 and skip batch 90.",
    "incidents": [],
    "to_step": 80,
    "skip_batches": [90],
}
_CONTEXT = {"attempt": 1, "timeline": 0, "step": 80, "held": [80], "decides": True, "ended": False}


class Event(BaseModel):
    """Something that happened to a job."""

    id: int
    job: str
    attempt: int
    time: float
    kind: str
    message: str
    detail: dict[str, Any]


class _Following(BaseModel):
    """A page of what grows while a job runs."""

    next: int = Field(description="`after` of the next page, which may still be empty.")
    state: State
    settled: bool = Field(description="Nothing more will come by itself.")


class EventPage(_Following):
    """Events, oldest first."""

    model_config = example({"events": [_EVENT], "next": 12, **FOLLOWED})

    events: list[Event]


class Step(BaseModel):
    """A step of the whole job, with more fields than are listed here."""

    model_config = ConfigDict(extra="allow")

    id: int
    attempt: int
    timeline: int
    step: int
    time: float
    batch: int
    loss: Number
    grad_norm: Number
    lr: Number
    tokens: int
    step_time_s: float
    tensors: dict[str, Any] = Field(description="FP8 statistics by column; empty on request.")


class StepPage(_Following):
    """Steps, in the order in which they were stored."""

    model_config = example({"steps": [_STEP], "next": 120, **FOLLOWED})

    steps: list[Step]


class Incident(BaseModel):
    """A trouble that a detector saw."""

    model_config = ConfigDict(extra="allow")

    kind: str
    detector: str
    attempt: int
    timeline: int
    step: int
    onset_step: int
    time: float
    message: str
    evidence: dict[str, Number]
    suspects: list[dict[str, Any]]
    ranks: list[int]


class Action(BaseModel):
    """A decision, with what it answers and why."""

    model_config = ConfigDict(extra="allow")

    kind: str
    attempt: int
    timeline: int
    step: int
    time: float
    reason: str
    incidents: list[Incident]
    to_step: int | None
    skip_batches: list[int]


class Context(BaseModel):
    """What a supervisor knew beside a step's record."""

    attempt: int
    timeline: int
    step: int
    held: list[int]
    decides: bool
    ended: bool


class RecordPage(BaseModel):
    """Incidents, actions and contexts, each kind oldest first."""

    model_config = example(
        {
            "newest_step": 120,
            "incidents": [_INCIDENT],
            "actions": [_ACTION],
            "contexts": [_CONTEXT],
            "next": "3.2.14",
            "more": False,
        }
    )

    newest_step: int = Field(description="Id of the newest step when the first page was read.")
    incidents: list[Incident]
    actions: list[Action]
    contexts: list[Context]
    next: str = Field(description="`after` of the next page.")
    more: bool = Field(description="The next page has something.")


class IncidentPage(BaseModel):
    """Incidents, oldest first."""

    model_config = example({"incidents": [_INCIDENT], "next": 3})

    incidents: list[Incident]
    next: int = Field(description="`after` of the next page, which may still be empty.")
