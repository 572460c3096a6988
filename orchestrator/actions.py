"""What the recovery policy reads (``History``) and answers (``Action``).

Promises: frozen values without clock or I/O; an ``Action`` round-trips through JSON
without loss, so that the stored actions of a job are its whole memory.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from monitoring.records import Incident
from parallel.config import ExchangeDtype, Precision

ActionKind = Literal[
    "none",
    "skip_step",
    "exchange_chosen",
    "exchange_bf16",
    "exchange_fp8",
    "rollback",
    "early_fallback",
    "layer_fallback",
    "return_to_fp8",
    "whole_bf16",
    "accept",
    "lower_lr",
    "restart",
    "pause",
    "fail",
    "precision",
    "exchange_auto",
    "resumed",
]
"""``precision``, ``exchange_auto`` and ``resumed`` (from another job's checkpoint, by the spec) are
asked for by people only; what a person asks for besides has the kind that the ladder gives it, with
``Action.asked``."""


@dataclass(frozen=True, slots=True)
class PassedOver:
    """A rung that was not taken, and why."""

    rung: ActionKind
    why: str


@dataclass(frozen=True, slots=True)
class Asked:
    """Who asked for an action. What a person asks for charges no budget of the policy."""

    by: str
    key: str
    """Of the control that asked for it (``orchestrator.recovery.controls.Control``)."""
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Action:
    """A decision with all that explains it."""

    kind: ActionKind
    attempt: int
    timeline: int
    """Timeline in which it was decided."""
    step: int
    """Newest step recorded when it was decided."""
    time: float
    reason: str
    """One sentence for a person."""
    incidents: tuple[Incident, ...] = ()
    """What it answers; empty for a return to FP8, and for what a person asked for."""
    to_step: int | None = None
    """Step that training goes back to. With ``in_place`` False it is the newest step that
    the next attempt may start from; None: the newest that there is."""
    in_place: bool = True
    """False: the ranks are ended, and the next attempt restores a keeper's snapshot or a
    checkpoint."""
    skip_batches: tuple[int, ...] = ()
    precision: Mapping[str, Precision] = field(default_factory=dict)
    lr_scale: float | None = None
    """New factor on the learning rate; None: unchanged."""
    exchange: ExchangeDtype | None = None
    """What gradients cross the network in from now on; None: unchanged."""
    passed_over: tuple[PassedOver, ...] = ()
    asked: Asked | None = None
    """Who asked for it; None: the policy decided."""

    def to_json(self) -> dict[str, Any]:
        row = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        row["incidents"] = [incident.to_json() for incident in self.incidents]
        row["skip_batches"] = list(self.skip_batches)
        row["precision"] = dict(self.precision)
        row["passed_over"] = [{"rung": p.rung, "why": p.why} for p in self.passed_over]
        row["asked"] = None if self.asked is None else dataclasses.asdict(self.asked)
        return row

    @classmethod
    def from_json(cls, row: Mapping[str, Any]) -> Action:
        values = dict(row)
        values["incidents"] = tuple(Incident.from_json(i) for i in values["incidents"])
        values["skip_batches"] = tuple(values["skip_batches"])
        values["precision"] = dict(values["precision"])
        values["passed_over"] = tuple(PassedOver(**p) for p in values["passed_over"])
        asked = values.get("asked")
        values["asked"] = None if asked is None else Asked(**asked)
        return cls(**values)


@dataclass(frozen=True, slots=True)
class Restorable:
    """A step that every rank can go back to."""

    step: int
    timeline: int
    """Timeline in which it was made."""
    certified: bool
    """Enough healthy steps followed it."""


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
    exchange: ExchangeDtype | None = None
    """What gradients cross the network in; None: not decided yet."""
    guessing_loss: float = math.inf
    """Nats a token of a model that guesses: the logarithm of its vocabulary."""
