"""What crosses between the supervisor and a rank: assignments, commands, reports.

Promises: plain frozen values that pickle without torch, each marked with the attempt
it belongs to. A rank refuses a command of another attempt, the supervisor a report.

A command takes effect on all ranks at the same step boundary: the supervisor posts it
to every rank and to rank 0 last; the number that rank 0 last saw travels in the
step's health all-reduce, and every rank then applies all commands up to it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from launch.config import RunConfig
from parallel.config import ExchangeDtype, Precision
from parallel.precision.choice import BackendChoice


@dataclass(frozen=True, slots=True)
class Rollback:
    """Restore every rank's in-memory snapshot of ``to_step`` and go on as ``timeline``."""

    to_step: int
    timeline: int
    skip_batches: tuple[int, ...] = ()
    """Batch indices added to the skip ledger."""
    precision: Mapping[str, Precision] | None = None
    """Layers whose precision changes with it."""
    lr_scale: float | None = None
    """New factor on the learning rate; None: unchanged."""


@dataclass(frozen=True, slots=True)
class SetPrecision:
    """Move layers to BF16 or back to FP8, from the next step on."""

    precision: Mapping[str, Precision]


@dataclass(frozen=True, slots=True)
class SetExchange:
    """What gradients cross the network in, from the next step on."""

    dtype: ExchangeDtype | Literal["auto"]
    """auto: measured by all ranks before that step; rank 0 tells what it came to."""


@dataclass(frozen=True, slots=True)
class Stop:
    """End the loop after this step; with a durable checkpoint first if asked."""

    reason: str
    checkpoint: bool = True


Order = Rollback | SetPrecision | SetExchange | Stop


@dataclass(frozen=True, slots=True)
class Command:
    """An order with its place in the attempt."""

    attempt: int
    number: int
    """From 1, without gaps, within the attempt."""
    order: Order


@dataclass(frozen=True, slots=True)
class RestorePoint:
    """Where an attempt takes its state from; every rank gets the same step."""

    step: int
    tier: Literal["memory", "disk"]
    """memory: a snapshot keeper, the node's own or a partner's; disk: a checkpoint."""
    attempt: int
    """Attempt that made the copy."""
    timeline: int
    path: str = ""
    """Folder of the checkpoint, for tier disk."""


@dataclass(frozen=True, slots=True)
class Assignment:
    """All that makes a worker rank ``rank`` of one attempt."""

    job: str
    attempt: int
    timeline: int
    rank: int
    world_size: int
    local_rank: int
    local_size: int
    master_addr: str
    master_port: int
    job_dir: str
    run: RunConfig
    """The completed configuration of the run."""
    restore: RestorePoint | None
    """None: start from the seed."""
    ledger: tuple[int, ...]
    """Batch indices skipped so far."""
    precision: Mapping[str, Precision]
    """Layers that differ from the spec's precision."""
    lr_scale: float
    fired_drills: tuple[int, ...]
    exchange: ExchangeDtype | None = None
    """What gradients cross the network in, whatever the state restored says; None: as it
    says, or as the spec does."""
    envs: Mapping[str, str] = field(default_factory=dict)
    """The spec's ``envs``."""
    fallbacks: tuple[RestorePoint, ...] = ()
    """What all ranks take where one of them has no usable copy of ``restore``, best first."""

    @property
    def log_path(self) -> Path:
        """Where the rank's output goes."""
        return Path(self.job_dir) / "logs" / f"attempt-{self.attempt}" / f"rank-{self.rank}.log"


@dataclass(frozen=True, slots=True)
class RankReport:
    """What one rank measured in one step; the supervisor merges them to a StepRecord."""

    attempt: int
    timeline: int
    rank: int
    step: int
    time: float
    batch: int
    loss: float
    grad_norm: float
    lr: float
    tokens: int
    step_time_s: float
    skipped: bool
    nonfinite_parameters: tuple[str, ...]
    nonfinite_loss: bool
    comm: Mapping[str, float]
    stats: bytes
    """float32 [tensors, columns] of ``monitoring.amax``, this rank's own layers."""
    stats_names: tuple[str, ...]
    """``"{layer}/{role}"`` by row."""
    high_precision_layers: tuple[str, ...]
    drills: tuple[int, ...]
    command: int
    """Number of the last command applied, 0 for none."""
    checksums: bytes = b""
    """int64 [parameters, 2] of ``parallel.replica_check``, before the step; empty where the step
    isn't compared."""
    checksum_names: tuple[str, ...] = ()
    """Parameter by row."""
    replicas: tuple[int, ...] = ()
    """Ranks that hold the same parameters."""
    compute_s: float = 0.0
    """Of ``step_time_s``, what was not spent waiting for other ranks."""


@dataclass(frozen=True, slots=True)
class SnapshotReport:
    """A rank holds a verified copy of its state of ``step``."""

    attempt: int
    timeline: int
    rank: int
    step: int
    tier: Literal["ring", "memory", "partner", "disk"]
    """ring: in the rank itself; memory: in its node's keeper; partner: in another node's keeper;
    disk: written, not yet committed."""
    nbytes: int
    digest: str
    path: str = ""
    partner: int = 0
    """Which of the rank's partners holds it, for tier partner."""


@dataclass(frozen=True, slots=True)
class RollbackReport:
    """A rank went back to ``step`` (state restored, about to run it)."""

    attempt: int
    timeline: int
    rank: int
    step: int
    time: float
    seconds: float
    """Time the restore took on this rank."""


@dataclass(frozen=True, slots=True)
class DrillReport:
    """A rank is about to fire a drill; delivered before it does, so that it fires once."""

    attempt: int
    timeline: int
    rank: int
    step: int
    time: float
    drill: int
    """Index in the spec's ``drills``."""


@dataclass(frozen=True, slots=True)
class CopyFailed:
    """A rank could not make a copy of its state of ``step``; it trains on."""

    attempt: int
    timeline: int
    rank: int
    step: int
    tier: Literal["ring", "memory", "partner", "disk"]
    error: str
    """One sentence for a person."""
    left_out: bool = False
    """It was not tried, as the one before it is still being written."""


@dataclass(frozen=True, slots=True)
class CopyRefused:
    """A copy that a rank was to start from is damaged or missing; it was not loaded."""

    attempt: int
    timeline: int
    rank: int
    step: int
    tier: Literal["memory", "partner", "disk"]
    error: str
    """One sentence for a person."""
    point: RestorePoint | None = None
    """Set where this rank will never have another copy of that step: no rank can start from it.
    A keeper that doesn't answer may do so the next time."""


@dataclass(frozen=True, slots=True)
class RestoredOlder:
    """All ranks start from ``point``, one of the fallbacks; told by rank 0."""

    attempt: int
    timeline: int
    rank: int
    step: int
    point: RestorePoint


@dataclass(frozen=True, slots=True)
class RingReport:
    """Every rank's ring holds ``kept`` snapshots, fewer than ``snapshots.keep``, for want of
    memory; told by rank 0 of an attempt, before any snapshot."""

    attempt: int
    timeline: int
    rank: int
    step: int
    kept: int


@dataclass(frozen=True, slots=True)
class BackendReport:
    """What the ranks agreed to run their linears on; told by rank 0 once its engine is built."""

    attempt: int
    timeline: int
    rank: int
    step: int
    time: float
    choice: BackendChoice


@dataclass(frozen=True, slots=True)
class ExchangeReport:
    """What gradients cross the network in under ``auto``; told by rank 0, once an attempt, where
    the job's decision wasn't known when it was assigned, and whenever it was told to measure."""

    attempt: int
    timeline: int
    rank: int
    step: int
    time: float
    dtype: ExchangeDtype
    reason: str
    """Half a sentence for a person, with the times measured."""


Report = (
    RankReport
    | SnapshotReport
    | RollbackReport
    | DrillReport
    | CopyFailed
    | CopyRefused
    | RestoredOlder
    | RingReport
    | BackendReport
    | ExchangeReport
)


@dataclass(frozen=True, slots=True)
class RankResult:
    """How a rank's loop ended."""

    rank: int
    step: int
    """Steps done in all."""
    reason: Literal["finished", "stopped"]
    detail: str = ""
    command: int = 0
    """Number of the last command applied, 0 for none."""
