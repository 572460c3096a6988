"""Jobs, and the specs that they were submitted with."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, Field

from orchestrator.api.models.fields import State, example

_SEAT = {"node_id": "9f" * 28, "node_ip": "10.0.0.1", "bundle": 0, "slots": 4, "spare": False}
_JOB: dict[str, Any] = {
    "id": "toy-1a2b3c",
    "name": "toy",
    "state": "running",
    "reason": "first step done",
    "settled": False,
    "step": 119,
    "steps": 240,
    "loss": 2.1875,
    "attempt": 1,
    "timeline": 0,
    "priority": 0,
    "submitted_by": "alice",
    "file": "job.yaml",
    "job_dir": "/shared/jobs/toy-1a2b3c",
    "submitted_at": 1796000000.0,
    "started_at": 1796000004.5,
    "ended_at": None,
    "nodes": [_SEAT],
}
_ATTEMPT = {"attempt": 1, "reason": "first start", "started_at": 1796000004.5}


class Seat(BaseModel):
    """A node that a job holds."""

    node_id: str
    node_ip: str
    bundle: int
    slots: int
    spare: bool


class Job(BaseModel):
    """A job in a list."""

    model_config = example(_JOB)

    id: str
    name: str
    state: State
    reason: str = Field(description="Why it is in this state, or what it waits for.")
    settled: bool = Field(description="Nothing more will happen by itself.")
    step: int = Field(description="Newest step that was not given up; -1: none.")
    steps: int
    loss: float | None
    attempt: int
    timeline: int
    priority: int
    submitted_by: str = Field(description="Who submitted it; a token's name owns its jobs.")
    file: str
    job_dir: str
    submitted_at: float
    started_at: float | None
    ended_at: float | None
    nodes: list[Seat]


class Attempt(BaseModel):
    """A start of a job's ranks."""

    attempt: int
    reason: str
    started_at: float


class JobDetail(Job):
    """A job with its spec and its attempts."""

    model_config = example(
        {
            **_JOB,
            "backend": "native",
            "backend_reason": "no CUDA device",
            "backend_warning": "",
            "rank_peak_tokens_per_s": 20400.0,
            "checkpoint_step": 100,
            "attempts": [_ATTEMPT],
            "spec": {"name": "toy", "slots_per_node": 4},
        }
    )

    backend: str = Field(description="What the FP8 linears run on.")
    backend_reason: str
    backend_warning: str
    rank_peak_tokens_per_s: float | None = Field(
        description="Of one rank at an MFU of 100 %; null without `resources.device`."
    )
    checkpoint_step: int | None = Field(
        description="Of the checkpoint that was written last; null: none was."
    )
    attempts: list[Attempt]
    spec: dict[str, Any] = Field(description="The job file, completed.")


class JobPage(BaseModel):
    """Jobs, oldest first."""

    model_config = example({"jobs": [_JOB], "next": "toy-1a2b3c"})

    jobs: list[Job]
    next: str | None = Field(description="`after` of the next page; null: this is the last.")


class CompletedSpec(BaseModel):
    """A job file with every default filled in."""

    model_config = example({"spec": {"name": "toy", "slots_per_node": 4, "num_nodes": 1}})

    spec: dict[str, Any]
