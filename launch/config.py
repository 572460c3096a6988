"""Configuration of training on the nodes: data, steps, snapshots, checkpoints.

Promises: frozen values, unknown keys refused; batch arithmetic is completed in
``orchestrator.spec.job``, which knows the degrees.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from launch.drills.config import Drill
from parallel.config import (
    MOST,
    ExchangeDtype,
    FP8Config,
    GradientExchangeConfig,
    ModelConfig,
    ParallelismConfig,
    Precision,
)


class _Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class DataConfig(_Section):
    """Where the tokens come from."""

    source: str = "python-stdlib"
    """A file, a folder, or ``python-stdlib``: the .py sources of the running Python."""
    pattern: str = "**/*.py"
    """Files taken of a folder."""
    tokenizer: Literal["bytes"] = "bytes"
    shuffle: bool = True
    """Draw sequences in a random order; false: as they stand in the files, for data whose order is
    meant (a curriculum)."""
    shuffle_seed: int = 0
    """Seed of the random order."""


class TrainingConfig(_Section):
    """Steps, batch and optimizer."""

    steps: int = Field(1000, ge=1)
    seq_len: int = Field(128, ge=8, le=2 * MOST)
    """Tokens a sequence."""
    train_batch_size: int | None = Field(None, ge=1, le=MOST)
    """Sequences a step over all replicas."""
    train_micro_batch_size_per_gpu: int | None = Field(None, ge=1, le=MOST)
    """Sequences a micro-batch on one replica."""
    gradient_accumulation_steps: int | None = Field(None, ge=1, le=MOST)
    """Micro-batches a step; any one of the three follows from the others."""
    lr: float = Field(3e-4, gt=0)
    """Peak learning rate."""
    min_lr_ratio: float = Field(0.1, ge=0, le=1)
    """Learning rate at the end over the peak."""
    warmup_steps: int = Field(0, ge=0)
    schedule: Literal["cosine", "linear", "constant"] = "cosine"
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = Field(1e-8, gt=0)
    weight_decay: float = Field(0.1, ge=0)
    max_norm: float = Field(1.0, gt=0)
    """Gradient norm above which gradients are scaled down."""
    seed: int = 0
    """Seed of the weights."""
    recompute: Literal["none", "full"] = "none"
    """``full``: transformer layers drop their activations and compute them again in the
    backward: a third more arithmetic for a fraction of the memory, and the same losses."""


class SnapshotConfig(_Section):
    """State kept in memory for rollbacks and restarts."""

    every: int = Field(10, ge=1)
    """Steps between snapshots."""
    keep: int = Field(4, ge=2)
    """Snapshots kept a rank."""
    certify_after: int = Field(10, ge=0)
    """Healthy steps after which a snapshot counts as good."""
    replicas: int | None = Field(None, ge=0)
    """Other nodes that hold a copy of each; unset: 1 where the job has two nodes or more."""


class CheckpointConfig(_Section):
    """State on disk."""

    storage_path: Path | None = None
    """Folder for the job's directory; unset: the controller's."""
    every: int = Field(500, ge=0)
    """Steps between checkpoints; 0: only at the end, on cancel and on pause."""
    num_to_keep: int = Field(3, ge=1)
    resume_from: Path | None = None
    """Where a new job begins: another job's folder, or one checkpoint in it, of any degrees."""


class RunConfig(_Section):
    """All that a rank needs to know of a job; ``orchestrator.spec.job.JobSpec`` adds the rest."""

    num_nodes: int = Field(1, ge=1, le=20_000)
    slots_per_node: int | None = Field(None, ge=1, le=1024)
    """Ranks a node on CPU."""
    gpus_per_node: int | None = Field(None, ge=1, le=1024)
    """Ranks a node on GPU, one a device; give this or ``slots_per_node``."""
    parallelism: ParallelismConfig = ParallelismConfig()
    model: ModelConfig = ModelConfig()
    data: DataConfig = DataConfig()
    training: TrainingConfig = TrainingConfig()
    precision: Precision = "fp8"
    """What linears compute in; fp8 has its details under ``fp8``."""
    fp8: FP8Config = FP8Config()
    communication_data_type: Literal[ExchangeDtype, "auto"] = "fp8"
    """What gradients cross the network in. auto: measured before the job's first step, fp8 where
    it is faster than bf16; the job keeps that answer through every restart."""
    gradient_exchange: GradientExchangeConfig = GradientExchangeConfig()
    snapshots: SnapshotConfig = SnapshotConfig()
    replica_check_every: int = Field(10, ge=0)
    """Steps between comparisons of the parameters that data-parallel replicas hold; 0: never. As
    often as snapshots, so that a state that was compared is there to go back to. Megatron's
    check stops training, is off by default and run every 20,000 steps where it is on; this one
    reads the parameters once, beside it. A bit flipped in a parameter lives until the next
    update: 1 sees each."""
    merge_reports_from: int = Field(64, ge=2)
    """Ranks from which on each node puts its ranks' reports of a step together before they reach
    the supervisor, and so on upwards; smaller jobs' ranks report straight to it."""
    checkpoint: CheckpointConfig = CheckpointConfig()
    drills: tuple[Drill, ...] = ()
    """Faults to rehearse, each once."""
    deepspeed: dict[str, Any] = {}
    """Raw DeepSpeed configuration merged in; contradictions are errors."""
