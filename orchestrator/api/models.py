"""What the HTTP API answers with, as its OpenAPI description tells it, each with an example.

Promises: answers are built elsewhere, from rows of the store, and conform to these, which
``tests/unit/test_api_fuzz.py`` shows; a field may be added, none changes its meaning within /v1.
Times are seconds since the epoch; a number that isn't finite is ``"nan"``, ``"inf"`` or ``"-inf"``.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

Number = float | Literal["nan", "inf", "-inf"]
State = Literal[
    "queued",
    "starting",
    "running",
    "recovering",
    "paused",
    "cancelling",
    "succeeded",
    "failed",
    "cancelled",
]

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
_LOG_LINE = {
    "time": 1796000040.5,
    "level": "INFO",
    "attempt": 1,
    "rank": 0,
    "step": 119,
    "logger": "launch.training",
    "message": "ready",
}
_NODE: dict[str, Any] = {
    "node_id": "9f" * 28,
    "address": "10.0.0.1",
    "name": "node-1",
    "alive": True,
    "total": {"CPU": 8.0},
    "free": {"CPU": 4.0},
    "held_by": [{"job": "toy-1a2b3c", "slots": 4, "spare": False}],
    "quarantine": None,
}
_TOKEN: dict[str, Any] = {
    "id": "5f0c2a91",
    "name": "alice",
    "role": "submit",
    "state": "live",
    "created_at": 1796000000.0,
    "created_by": "home",
    "expires_at": 1803776000.0,
    "revoked_at": None,
}
_LAST = {"state": "running", "settled": False}


def _example(*values: dict[str, Any]) -> ConfigDict:
    return ConfigDict(json_schema_extra={"examples": list(values)})


class Health(BaseModel):
    """A controller that answers."""

    model_config = _example({"status": "ok"})

    status: Literal["ok"]


class Seat(BaseModel):
    """A node that a job holds."""

    node_id: str
    node_ip: str
    bundle: int
    slots: int
    spare: bool


class Job(BaseModel):
    """A job in a list."""

    model_config = _example(_JOB)

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

    model_config = _example(
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

    model_config = _example({"jobs": [_JOB], "next": "toy-1a2b3c"})

    jobs: list[Job]
    next: str | None = Field(description="`after` of the next page; null: this is the last.")


class CompletedSpec(BaseModel):
    """A job file with every default filled in."""

    model_config = _example({"spec": {"name": "toy", "slots_per_node": 4, "num_nodes": 1}})

    spec: dict[str, Any]


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

    model_config = _example({"events": [_EVENT], "next": 12, **_LAST})

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

    model_config = _example({"steps": [_STEP], "next": 120, **_LAST})

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

    model_config = _example(
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

    model_config = _example({"incidents": [_INCIDENT], "next": 3})

    incidents: list[Incident]
    next: int = Field(description="`after` of the next page, which may still be empty.")


class LogLineShown(BaseModel):
    """One line of a rank's log."""

    model_config = _example(_LOG_LINE)

    time: float | None = Field(description="Of a line that has none, that of the line before.")
    level: str = Field(
        description="A level of Python's logging; STDOUT, STDERR: printed; OUTPUT: past Python."
    )
    attempt: int | None
    rank: int | None
    step: int | None
    logger: str
    message: str


class LogPiece(BaseModel):
    """Lines of a rank's log."""

    model_config = _example(
        {
            "lines": [_LOG_LINE],
            "text": "2026-11-30T06:00:40.500Z INFO step 119 launch.training: ready\n",
            "offset": 4096,
            "attempt": 1,
            "rank": 0,
            "exists": True,
            **_LAST,
        }
    )

    lines: list[LogLineShown]
    text: str = Field(description="The same lines as text, their times in UTC.")
    offset: int = Field(description="Place at which the next piece begins.")
    attempt: int
    rank: int
    exists: bool = Field(description="The rank has written a log in this attempt.")
    state: State
    settled: bool


class ControlShown(BaseModel):
    """What was asked of a job, and what became of it."""

    model_config = _example(_CONTROL)

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

    model_config = _example({"controls": [_CONTROL], "next": None})

    controls: list[ControlShown]
    next: str | None = Field(description="`after` of the next page; null: this is the last.")


class QuarantineShown(BaseModel):
    """Why a node is left out."""

    node_id: str
    address: str
    kind: str
    reason: str
    by: str
    job: str
    since: float
    until: float | None = Field(description="null: until it is released.")
    released_at: float | None


class HeldBy(BaseModel):
    """A job that is on a node."""

    job: str
    slots: int
    spare: bool


class Node(BaseModel):
    """A node."""

    model_config = _example(_NODE)

    node_id: str
    address: str
    name: str
    alive: bool
    total: dict[str, float]
    free: dict[str, float]
    held_by: list[HeldBy]
    quarantine: QuarantineShown | None


class NodePage(BaseModel):
    """Nodes, by Ray's id."""

    model_config = _example({"nodes": [_NODE], "next": None})

    nodes: list[Node]
    next: str | None = Field(description="`after` of the next page; null: this is the last.")


class Token(BaseModel):
    """A token as it is listed: without its secret, which nobody has but its holder."""

    model_config = _example(_TOKEN)

    id: str
    name: str
    role: Literal["read", "submit", "admin"]
    state: Literal["live", "expired", "revoked"]
    created_at: float
    created_by: str
    expires_at: float | None
    revoked_at: float | None


class NewToken(Token):
    """A new token, with its secret, which is told this once."""

    model_config = _example({**_TOKEN, "token": "octavo_5f0c2a91_…"})

    token: str


class TokenPage(BaseModel):
    """Tokens, oldest first."""

    model_config = _example({"tokens": [_TOKEN], "next": None})

    tokens: list[Token]
    next: str | None = Field(description="`after` of the next page; null: this is the last.")


class RevokedTokens(BaseModel):
    """Tokens that are none any more."""

    model_config = _example({"revoked": [{**_TOKEN, "state": "revoked"}]})

    revoked: list[Token]


class WhoAmI(BaseModel):
    """Whose token this is."""

    model_config = _example({"name": "alice", "role": "submit", "expires_at": 1803776000.0})

    name: str = Field(description="`home`: the token of the controller's own home.")
    role: Literal["read", "submit", "admin"]
    expires_at: float | None
