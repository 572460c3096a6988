"""What people ask of running jobs."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, Field

from orchestrator.api.models.fields import example

_CONTROL: dict[str, Any] = {
    "job": "toy-1a2b3c",
    "key": "c0ffee",
    "kind": "rollback",
    "by": "alice",
    "time": 1796000050.0,
    "reason": "bad data",
    "to_step": 80,
    "skip_batches": [90, 91],
    "layers": [],
    "to": None,
    "state": "applied",
    "message": "Training goes on from step 80.",
    "step": 80,
    "answered_at": 1796000050.4,
}


class ControlShown(BaseModel):
    """What was asked of a job, and what became of it."""

    model_config = example(_CONTROL)

    job: str
    key: str
    kind: Literal["rollback", "precision", "exchange", "pause"]
    by: str
    time: float
    reason: str
    to_step: int | None
    skip_batches: list[int]
    layers: list[str]
    to: Literal["fp8", "bf16", "auto"] | None
    state: Literal["accepted", "applied", "refused"]
    message: str
    step: int | None
    answered_at: float | None


class ControlPage(BaseModel):
    """Controls of a job, oldest first."""

    model_config = example({"controls": [_CONTROL], "next": None})

    controls: list[ControlShown]
    next: str | None = Field(description="`after` of the next page; null: this is the last.")
