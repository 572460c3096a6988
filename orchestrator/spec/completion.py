"""What follows from a spec without being said in it: replicas, batch numbers, widths. Pure.

Promises: ``complete`` of a spec that ``spec_checks`` accepts has none of these unset, is
idempotent, and never changes a value that was given.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from launch.config import TrainingConfig
from orchestrator.spec.job import JobSpec
from parallel.layer_costs import ffn_size

_DEFAULT_MICRO_BATCH = 4

EXCHANGE_ERROR = {"e4m3": 0.04, "e5m2": 0.08}
"""``detection.exchange_error`` by format; see there."""


@dataclass(frozen=True, slots=True)
class Batch:
    """The three batch numbers; ``total`` = micro × accumulation × replicas."""

    total: int
    micro: int
    accumulation: int


class BatchRefusedError(ValueError):
    """The batch numbers given don't go together: ``key`` is the one to change, and how."""

    def __init__(self, key: str, message: str, remedy: str) -> None:
        super().__init__(key, message, remedy)
        self.key, self.message, self.remedy = key, message, remedy


def slots_per_node(spec: JobSpec) -> int:
    """Ranks a node; where neither count is given, as many as the degrees need."""
    given = spec.gpus_per_node or spec.slots_per_node
    if given:
        return given
    degrees = spec.parallelism
    ranks = degrees.tensor * degrees.pipeline * (degrees.data or 1)
    return math.ceil(ranks / spec.num_nodes)


def replicas(spec: JobSpec) -> int | None:
    """Data-parallel replicas; None where the degrees don't divide the slots."""
    slots = spec.num_nodes * slots_per_node(spec)
    model_ranks = spec.parallelism.tensor * spec.parallelism.pipeline
    if spec.parallelism.data:
        return spec.parallelism.data
    return slots // model_ranks if slots % model_ranks == 0 else None


def batch_numbers(training: TrainingConfig, data: int, pipeline: int) -> Batch:
    """The three numbers from those given; ``BatchRefusedError`` where they can't be completed.

    Free choices follow practice: micro-batches enough to fill the pipeline, otherwise as
    few as possible.
    """
    total = training.train_batch_size
    micro = training.train_micro_batch_size_per_gpu
    accumulation = training.gradient_accumulation_steps
    if total is None:
        micro = micro or _DEFAULT_MICRO_BATCH
        accumulation = accumulation or pipeline
        return Batch(micro * accumulation * data, micro, accumulation)
    _divide(total, data, f"{data} replicas")
    share = total // data
    if micro is None and accumulation is None:
        # At least as many micro-batches as stages keeps every stage busy.
        accumulation = next((n for n in range(pipeline, share + 1) if share % n == 0), share)
        return Batch(total, share // accumulation, accumulation)
    if micro is None:
        assert accumulation is not None
        _divide(total, data * accumulation, f"{data} replicas × {accumulation} micro-batches")
        return Batch(total, share // accumulation, accumulation)
    if accumulation is None:
        _divide(total, data * micro, f"{data} replicas × {micro} sequences a micro-batch")
        return Batch(total, micro, share // micro)
    if micro * accumulation * data != total:
        raise BatchRefusedError(
            "train_batch_size",
            f"isn't micro-batch {micro} × accumulation {accumulation} × {data} replicas "
            f"= {micro * accumulation * data}",
            f"leave one of the three out, or make it {micro * accumulation * data}",
        )
    return Batch(total, micro, accumulation)


def complete(spec: JobSpec) -> JobSpec:
    """``spec`` with everything filled in; its combinations have been checked before."""
    data = replicas(spec)
    assert data is not None, "spec_checks lets no such degrees pass"
    batch = batch_numbers(spec.training, data, spec.parallelism.pipeline)
    slots = {} if spec.gpus_per_node else {"slots_per_node": slots_per_node(spec)}
    model = {
        "ffn_size": ffn_size(spec.model),
        "num_kv_heads": spec.model.num_kv_heads or spec.model.num_heads,
    }
    if spec.model.factory is not None:
        model = {}  # a user's model has neither
    training = {
        "train_batch_size": batch.total,
        "train_micro_batch_size_per_gpu": batch.micro,
        "gradient_accumulation_steps": batch.accumulation,
    }
    snapshots = {}
    if spec.snapshots.replicas is None:
        snapshots["replicas"] = min(1, spec.num_nodes - 1)
    detection = {}
    if spec.detection.exchange_error is None:
        detection["exchange_error"] = EXCHANGE_ERROR[spec.gradient_exchange.format]
    return spec.model_copy(
        update={
            **slots,
            "parallelism": spec.parallelism.model_copy(update={"data": data}),
            "model": spec.model.model_copy(update=model),
            "training": spec.training.model_copy(update=training),
            "snapshots": spec.snapshots.model_copy(update=snapshots),
            "detection": spec.detection.model_copy(update=detection),
        }
    )


def _divide(total: int, by: int, what: str) -> None:
    if total % by == 0:
        return
    below, above = total // by * by, (total // by + 1) * by
    near = f"{below} or {above}" if below else str(above)
    raise BatchRefusedError("train_batch_size", f"isn't divisible by {what}", f"make it {near}")
