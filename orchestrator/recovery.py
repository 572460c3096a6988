"""The recovery policy: (incident, history, policy) → Action. Pure: no clock, no I/O."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from monitoring.records import Incident
from parallel.config import Precision

ActionKind = Literal[
    "none",
    "skip_step",
    "rollback",
    "layer_fallback",
    "return_to_fp8",
    "whole_bf16",
    "lower_lr",
    "restart",
    "pause",
    "fail",
]


@dataclass(frozen=True, slots=True)
class PassedOver:
    """A rung that was not taken, and why."""

    rung: ActionKind
    why: str


@dataclass(frozen=True, slots=True)
class Action:
    """A decision with all that explains it."""

    kind: ActionKind
    attempt: int
    timeline: int
    """Timeline in which it was decided."""
    step: int
    """Step at which it was decided."""
    time: float
    reason: str
    """One sentence for a person."""
    incidents: tuple[Incident, ...] = ()
    """What it answers; empty for a return to FP8."""
    to_step: int | None = None
    """Step that training goes back to."""
    skip_batches: tuple[int, ...] = ()
    precision: Mapping[str, Precision] = field(default_factory=dict)
    lr_scale: float | None = None
    passed_over: tuple[PassedOver, ...] = ()


@dataclass(frozen=True, slots=True)
class Restorable:
    """A step that every rank can go back to."""

    step: int
    timeline: int
    certified: bool


@dataclass(frozen=True, slots=True)
class History:
    """What the policy may know, all of it from stored records."""

    attempt: int
    timeline: int
    step: int
    """Newest step recorded."""
    time: float
    actions: tuple[Action, ...]
    """All earlier actions of the job, oldest first."""
    restorable: tuple[Restorable, ...]
    """In-memory snapshots that all ranks hold on this timeline, oldest first."""
    precision: Mapping[str, Precision]
    """Layers that differ from the spec's precision."""
    fp8_layers: tuple[str, ...]
    """All linears that the spec runs in FP8."""
    lr_scale: float
    ledger: tuple[int, ...]
    batches: Mapping[int, int]
    """Recent steps of this timeline → batch index each used."""
    last_incident_step: int | None
