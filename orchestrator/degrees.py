"""A job's degrees on another number of nodes, or as a person asks for them. Pure.

Promises: the batch stays the same (``train_batch_size`` sequences a step, in the order that the
spec says), so that a step trains on the same tokens on any degrees; tensor and pipeline ranks stay
as they are when nodes are fewer: replicas go, and micro-batches a step come instead. A micro-batch
never grows, since it was chosen to fit a device.
"""

from __future__ import annotations

from collections.abc import Iterator

from launch.config import TrainingConfig
from orchestrator.spec import JobSpec
from orchestrator.spec_completion import slots_per_node
from orchestrator.spec_deepspeed import check_deepspeed


class DegreesRefusedError(ValueError):
    """A job can't run on such degrees; the message is half a sentence that says why."""


def on_nodes(spec: JobSpec, nodes: int) -> JobSpec:
    """The completed ``spec`` as it runs on ``nodes`` nodes of as many slots as its own have.

    Raises DegreesRefusedError where no such replicas can be made, or can't share the batch.
    """
    degrees = spec.parallelism
    one_replica = degrees.tensor * degrees.pipeline
    slots = slots_per_node(spec)
    replicas, left_over = divmod(nodes * slots, one_replica)
    if nodes < 1 or left_over or not replicas:
        raise DegreesRefusedError(
            f"{nodes} nodes with {slots} slots don't make replicas of tensor {degrees.tensor} × "
            f"pipeline {degrees.pipeline} = {one_replica} ranks"
        )
    fitted = spec.model_copy(
        update={
            "num_nodes": nodes,
            "parallelism": degrees.model_copy(update={"data": replicas}),
            "training": spec.training.model_copy(update=_batch(spec.training, replicas)),
        }
    )
    # A raw section may repeat the batch numbers, and so hold them fast.
    for problem in check_deepspeed(fitted):
        key = ".".join(map(str, problem.path))
        raise DegreesRefusedError(f"{key} {problem.message} with {replicas} replicas")
    return fitted


def node_counts(spec: JobSpec, least: int) -> Iterator[int]:
    """Numbers of nodes that the completed ``spec`` can run on, its own first, down to ``least``."""
    for nodes in range(spec.num_nodes, least - 1, -1):
        try:
            on_nodes(spec, nodes)
        except DegreesRefusedError:
            continue
        yield nodes


def _batch(training: TrainingConfig, replicas: int) -> dict[str, int]:
    """The same batch over ``replicas``: the largest micro-batch up to the present one."""
    total, micro = training.train_batch_size, training.train_micro_batch_size_per_gpu
    assert total is not None and micro is not None, "the spec is complete"
    share, left_over = divmod(total, replicas)
    if left_over:
        raise DegreesRefusedError(
            f"train_batch_size {total} isn't divisible by {replicas} replicas"
        )
    fitting = next(n for n in range(min(micro, share), 0, -1) if share % n == 0)
    return {
        "train_micro_batch_size_per_gpu": fitting,
        "gradient_accumulation_steps": share // fitting,
    }
