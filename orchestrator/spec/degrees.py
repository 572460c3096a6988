"""A job's degrees on another number of nodes, or as a person asks for them. Pure.

Promises: the batch stays the same (``train_batch_size`` sequences a step, in the order that the
spec says), so that a step trains on the same tokens on any degrees; tensor and pipeline ranks stay
as they are when nodes are fewer: replicas go, and micro-batches a step come instead. A micro-batch
never grows, since it was chosen to fit a device.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any, Literal, get_args

from launch.config import TrainingConfig
from monitoring.wording import counted
from orchestrator.events import EventDraft
from orchestrator.spec.completion import complete, slots_per_node
from orchestrator.spec.deepspeed import check_deepspeed
from orchestrator.spec.errors import Finding, KeyPath
from orchestrator.spec.job import JobSpec, spec_data

Word = Literal["tensor", "pipeline", "data", "zero_stage", "num_nodes", "slots_per_node"]
WORDS: tuple[Word, ...] = get_args(Word)
"""What of a job's degrees may be asked for anew; ``slots_per_node`` are GPUs where it has those."""


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
            f"{counted(nodes, 'node')} with {counted(slots, 'slot')} don't make replicas of tensor "
            f"{degrees.tensor} × pipeline {degrees.pipeline} = {one_replica} ranks"
        )
    fitted = spec.model_copy(
        update={
            "num_nodes": nodes,
            "snapshots": spec.snapshots.model_copy(
                update={"replicas": _copies(spec.snapshots.replicas, nodes)}
            ),
            "parallelism": degrees.model_copy(update={"data": replicas}),
            "training": spec.training.model_copy(update=_batch(spec.training, replicas)),
        }
    )
    # A raw section may repeat the batch numbers, and so hold them fast.
    for problem in check_deepspeed(fitted):
        key = ".".join(map(str, problem.path))
        raise DegreesRefusedError(f"{key} {problem.message} with {replicas} replicas")
    return fitted


def as_asked(spec: JobSpec, asked: Mapping[Word, int]) -> dict[str, Any]:
    """Values of the completed ``spec`` with other degrees, still to be checked as a job's.

    What isn't asked for stays, but for the replicas, which are as many as the slots then make,
    and slots a node, which are as many as degrees asked for need.
    """
    values = spec_data(spec)
    slots_key = "gpus_per_node" if spec.gpus_per_node else "slots_per_node"
    degrees = {
        **values["parallelism"],
        **{word: asked[word] for word in ("tensor", "pipeline", "zero_stage") if word in asked},
    }
    values["num_nodes"] = nodes = asked.get("num_nodes", spec.num_nodes)
    one_replica = degrees["tensor"] * degrees["pipeline"]
    if "data" in asked and "slots_per_node" not in asked:
        values[slots_key] = math.ceil(one_replica * asked["data"] / max(nodes, 1))
    else:
        values[slots_key] = asked.get("slots_per_node", slots_per_node(spec))
    degrees["data"] = asked.get("data")
    replicas = asked.get("data") or max(1, nodes * values[slots_key] // max(one_replica, 1))
    training = dict(values["training"])
    training.pop("gradient_accumulation_steps")
    share = training["train_batch_size"] // replicas
    micro = training["train_micro_batch_size_per_gpu"]
    # Where the batch can't be shared, the check of the whole says so.
    fitting = (n for n in range(min(micro, share), 0, -1) if share % n == 0)
    training["train_micro_batch_size_per_gpu"] = next(fitting, 1)
    snapshots = {**values["snapshots"], "replicas": _copies(spec.snapshots.replicas, nodes)}
    return {**values, "parallelism": degrees, "training": training, "snapshots": snapshots}


def node_counts(spec: JobSpec, least: int) -> Iterator[int]:
    """Numbers of nodes that the completed ``spec`` can run on, its own first, down to ``least``."""
    for nodes in range(spec.num_nodes, least - 1, -1):
        try:
            on_nodes(spec, nodes)
        except DegreesRefusedError:
            continue
        yield nodes


def other_degrees(spec: JobSpec, now: float) -> EventDraft:
    """A job goes on with the degrees of ``spec``."""
    degrees, training = spec.parallelism, spec.training
    message = (
        f"Degrees from here on: tensor {degrees.tensor}, pipeline {degrees.pipeline}, data "
        f"{degrees.data}, ZeRO {degrees.zero_stage}, on {counted(spec.num_nodes, 'node')} with "
        f"{counted(slots_per_node(spec), 'slot')}; "
        f"{training.gradient_accumulation_steps} micro-batches of "
        f"{training.train_micro_batch_size_per_gpu} a step."
    )
    detail = {**degrees.model_dump(), "num_nodes": spec.num_nodes}
    return EventDraft("degrees", now, message, detail)


def check_min_nodes(spec: JobSpec) -> Iterator[Finding]:
    """What stands against ``resources.min_nodes``."""
    least = spec.resources.min_nodes
    path: KeyPath = ("resources", "min_nodes")
    if least is None:
        return
    if least > spec.num_nodes:
        remedy = f"make it at most {spec.num_nodes}"
        yield Finding(path, f"is more than num_nodes {spec.num_nodes}", remedy)
        return
    try:
        completed = complete(spec)
    except (AssertionError, ValueError):
        return  # has a finding of its own
    if least < spec.num_nodes and len(list(node_counts(completed, least))) < 2:
        message = (
            f"from {least} to {spec.num_nodes - 1} no number of nodes makes replicas that can "
            f"share train_batch_size {completed.training.train_batch_size}"
        )
        yield Finding(path, message, "choose a batch that more counts divide, or leave it out")


def _copies(asked: int | None, nodes: int) -> int:
    """Nodes that may hold a copy of a snapshot of another."""
    return min(asked or 0, max(nodes - 1, 0))


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
