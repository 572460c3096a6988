"""What is measured: one StepRecord a step, one Incident a trouble seen.

Promises: values are frozen, round-trip through JSON (``to_json``/``from_json``)
without loss (non-finite floats included), and carry the attempt and timeline they
belong to, so that a reader can refuse what another attempt wrote.

A *timeline* is counted up by each rollback: (timeline, step) orders what happened,
and a step number that was rolled back appears again on a later timeline.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from monitoring.tensor_stats import NO_TENSORS, TensorColumns, TensorStats, encode_float

IncidentKind = Literal[
    "nonfinite",
    "loss_spike",
    "slow_divergence",
    "grad_norm_spike",
    "amax_saturation",
    "amax_surge",
    "projected_overflow",
    "underflow",
    "frozen_scale",
    "exchange_error",
    "replica_disagreement",
    "rank_died",
    "rank_hung",
    "slow_rank",
    "supervisor_lost",
    "preflight_failed",
]


EXCHANGE_BITS: Mapping[int, str] = {8: "fp8", 16: "bf16", 32: "fp32"}
"""Bits an element on the network → the word of a spec's ``communication_data_type``."""


@dataclass(frozen=True, slots=True)
class ReplicaComparison:
    """The parameters of data-parallel ranks, compared before a step."""

    parameters: tuple[str, ...] = ()
    """Those that are not the same on all replicas; () when all are."""
    ranks: tuple[int, ...] = ()
    """Ranks that differ from most of their replicas, or all of them where there is no most."""
    outvoted: bool = False
    """``ranks`` are fewer than half of their replicas, so that they are the broken ones."""

    def to_json(self) -> dict[str, Any]:
        return {
            "parameters": list(self.parameters),
            "ranks": list(self.ranks),
            "outvoted": self.outvoted,
        }

    @classmethod
    def from_json(cls, row: Mapping[str, Any]) -> ReplicaComparison:
        return cls(tuple(row["parameters"]), tuple(row["ranks"]), bool(row["outvoted"]))


@dataclass(frozen=True, slots=True)
class StepRecord:
    """One optimizer step of the whole job, merged over its ranks."""

    attempt: int
    timeline: int
    step: int
    """Number of the step, from 0; its update makes the state of step + 1."""
    time: float
    """Seconds since the epoch when the step ended on the last rank."""
    batch: int
    """Index of the batch, as the skip ledger maps it."""
    loss: float
    """Mean cross-entropy in nats a token."""
    grad_norm: float
    """Global gradient norm before clipping."""
    lr: float
    tokens: int
    """Tokens consumed by the step."""
    step_time_s: float
    """Wall seconds of the step on the slowest rank."""
    skipped: bool = False
    """The update was left out because a gradient was not finite."""
    nonfinite_ranks: tuple[int, ...] = ()
    """Ranks whose own loss or gradient was not finite."""
    nonfinite_parameters: tuple[str, ...] = ()
    """Parameters whose local gradient was not finite, before any exchange."""
    comm: Mapping[str, float] = field(default_factory=dict)
    """``bytes``, ``uncompressed_bytes`` of the gradient exchange and its seconds, the mean rank's;
    ``relative_error``, the worst rank's: what one pipeline stage loses is not made up for by
    others; ``wire_bits`` an element of the matrices' gradients, ``EXCHANGE_BITS`` of its dtype."""
    tensors: Mapping[str, TensorStats] = field(default_factory=lambda: NO_TENSORS)
    """Statistics by ``"{layer}/{role}"``, as ``layers.3.mlp.down/input``."""
    high_precision_layers: tuple[str, ...] = ()
    """Linears that computed in BF16 in this step."""
    drills: tuple[int, ...] = ()
    """Indices of the spec's drills that fired in this step."""
    replicas: ReplicaComparison | None = None
    """How the replicas' parameters compared before this step; None where nobody looked."""

    def to_json(self) -> dict[str, Any]:
        row = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        for name in ("loss", "grad_norm", "lr"):
            row[name] = encode_float(row[name])
        row["comm"] = {k: encode_float(v) for k, v in self.comm.items()}
        row["tensors"] = TensorColumns.of(self.tensors).to_json()
        for name in ("nonfinite_ranks", "nonfinite_parameters", "high_precision_layers", "drills"):
            row[name] = list(row[name])
        row["replicas"] = None if self.replicas is None else self.replicas.to_json()
        return row

    @classmethod
    def from_json(cls, row: Mapping[str, Any]) -> StepRecord:
        values = dict(row)
        for name in ("loss", "grad_norm", "lr"):
            values[name] = float(values[name])
        values["comm"] = {k: float(v) for k, v in values["comm"].items()}
        values["tensors"] = TensorColumns.from_json(values["tensors"])
        for name in ("nonfinite_ranks", "nonfinite_parameters", "high_precision_layers", "drills"):
            values[name] = tuple(values[name])
        # Rows stored before there was such a comparison don't have it.
        replicas = values.get("replicas")
        values["replicas"] = None if replicas is None else ReplicaComparison.from_json(replicas)
        return cls(**values)


@dataclass(frozen=True, slots=True)
class Suspect:
    """A layer that moved first, with what shows it."""

    layer: str
    """Name of a linear, as ``layers.3.mlp.down``."""
    tensor: str
    """Role of the operand that moved."""
    evidence: Mapping[str, float]

    def to_json(self) -> dict[str, Any]:
        return {
            "layer": self.layer,
            "tensor": self.tensor,
            "evidence": {k: encode_float(v) for k, v in self.evidence.items()},
        }

    @classmethod
    def from_json(cls, row: Mapping[str, Any]) -> Suspect:
        return cls(row["layer"], row["tensor"], {k: float(v) for k, v in row["evidence"].items()})


@dataclass(frozen=True, slots=True)
class Incident:
    """One trouble, as one detector saw it (or the supervisor, for lost ranks; or the controller,
    for a lost supervisor)."""

    kind: IncidentKind
    detector: str
    attempt: int
    timeline: int
    step: int
    """Step whose record showed it."""
    onset_step: int
    """First step it is taken to have touched; a rollback lands at or before it."""
    time: float
    message: str
    """One sentence for a person, with the measured value and the limit."""
    evidence: Mapping[str, float] = field(default_factory=dict)
    suspects: tuple[Suspect, ...] = ()
    ranks: tuple[int, ...] = ()

    def to_json(self) -> dict[str, Any]:
        row = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        row["evidence"] = {k: encode_float(v) for k, v in self.evidence.items()}
        row["suspects"] = [s.to_json() for s in self.suspects]
        row["ranks"] = list(self.ranks)
        return row

    @classmethod
    def from_json(cls, row: Mapping[str, Any]) -> Incident:
        values = dict(row)
        values["evidence"] = {k: float(v) for k, v in values["evidence"].items()}
        values["suspects"] = tuple(Suspect.from_json(s) for s in values["suspects"])
        values["ranks"] = tuple(values["ranks"])
        return cls(**values)
