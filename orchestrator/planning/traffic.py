"""Bytes that a rank sends in one step, by kind; the rank that sends most of each.

Counted as the code sends them: a ring all-reduce of n ranks sends 2 (n - 1) / n of the data, an
all-to-all or all-gather (n - 1) / n. Small messages (norms, amax, losses, the ranks' agreement) are
left out.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

from orchestrator.planning.memory import bucket_size, snapshot_bytes, takes_buckets
from orchestrator.planning.shapes import Held, held, shape_of, stages
from orchestrator.spec.job import JobSpec
from parallel.config import EXCHANGE_BITS, ExchangeDtype


@dataclass(frozen=True, slots=True)
class Traffic:
    """Bytes a step."""

    gradient_exchange: int
    """Between replicas, in the dtype that the spec says."""
    parameter_gather: int
    """Updated parameters in BF16, from where they were updated to all replicas."""
    tensor: int
    """Sums of activations and of their gradients between tensor ranks."""
    pipeline: int
    """Activations to the next stage and gradients to the one before."""
    tied: int
    """Gradients of a matrix that the first and the last stage share."""
    snapshots: int
    """Copies to partner nodes, which go beside the training, shared out over steps."""

    @property
    def total(self) -> int:
        """All kinds together."""
        return sum(self.parts().values())

    def parts(self) -> dict[str, int]:
        """By kind."""
        return {field.name: getattr(self, field.name) for field in fields(self)}


def traffic(spec: JobSpec) -> Traffic:
    """Of a completed spec with the built-in model."""
    pipeline, training = spec.parallelism.pipeline, spec.training
    cut = stages(spec.model, training.seq_len, pipeline, spec.parallelism.tensor)
    # Stages amid the pipeline differ by what they hold alone.
    unlike = {(stage, i in (0, pipeline - 1)): i for i, stage in enumerate(cut)}
    each = [_of_stage(spec, i) for i in unlike.values()]
    return Traffic(*(max(getattr(t, f.name) for t in each) for f in fields(Traffic)))


def _of_stage(spec: JobSpec, index: int) -> Traffic:
    degrees, training = spec.parallelism, spec.training
    assert degrees.data is not None and training.train_micro_batch_size_per_gpu is not None
    assert training.gradient_accumulation_steps is not None
    shape = shape_of(spec.model)
    stage = stages(spec.model, training.seq_len, degrees.pipeline, degrees.tensor)[index]
    mine = held(shape, stage, degrees.tensor)
    data, tensor, pipeline = degrees.data, degrees.tensor, degrees.pipeline
    micro_batches = training.gradient_accumulation_steps
    tokens = training.train_micro_batch_size_per_gpu * training.seq_len
    stream = 2 * tokens * shape.hidden  # BF16
    # Two sums a layer forward and two backward. Computed again, a layer ends before its last.
    sums = stage.layers * (5 if training.recompute == "full" else 4)
    between = (index > 0) + (index < pipeline - 1)
    tied = shape.tied and pipeline > 1 and (stage.embedding or stage.head)
    copies = min(spec.snapshots.replicas or 0, spec.num_nodes - 1)
    return Traffic(
        gradient_exchange=exchanged_bytes(spec, mine),
        parameter_gather=2 * mine.total * (data - 1) // data if degrees.zero_stage else 0,
        tensor=2 * (tensor - 1) * stream * sums * micro_batches // tensor,
        pipeline=between * stream * micro_batches,
        tied=4 * shape.table if tied else 0,
        snapshots=copies * snapshot_bytes(spec, index) // spec.snapshots.every,
    )


def exchanged_bytes(spec: JobSpec, mine: Held) -> int:
    """What one rank sends of its gradients: matrices in the spec's dtype, vectors in FP32.

    ``auto`` is counted as FP8. Whole blocks of FP8 are counted as if none were cut short.
    """
    data = spec.parallelism.data or 1
    if data == 1:
        return 0
    asked = spec.communication_data_type
    wire: ExchangeDtype = "fp8" if asked == "auto" else asked
    bits = EXCHANGE_BITS[wire]
    block = spec.gradient_exchange.block
    matrices = mine.linears + mine.tables
    small = wire == "fp8" and matrices < spec.gradient_exchange.min_size
    width = 2.0 if small else bits / 8 * ((block + 1) / block if wire == "fp8" else 1.0)
    # Under a sharded optimizer a rank needs its own part alone: half the way.
    hops = 1 if _scattered(spec, matrices) else 2
    once = hops * (data - 1) / data * (width * matrices + 4 * mine.vectors)
    every_micro_batch = spec.parallelism.zero_stage == 2
    return int(
        once * ((spec.training.gradient_accumulation_steps or 1) if every_micro_batch else 1)
    )


def _scattered(spec: JobSpec, numel: int) -> bool:
    if not takes_buckets(spec):
        return spec.parallelism.zero_stage > 0
    # ``parallel.step_hooks.goes_scattered`` of a whole bucket.
    data = spec.parallelism.data or 1
    bucket = min(numel, bucket_size(spec))
    return data * min(-(-numel // data), bucket) < 2 * bucket
