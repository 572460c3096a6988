"""Drills that a job has no place for: steps, ranks, layers, tensors and parameters it lacks.

Each drill is looked at by itself, so that one that is wrong hides no other. What only a user's
own model knows (its linears, its parameters) is checked by the ranks, before their first step.
"""

from __future__ import annotations

from collections.abc import Iterator

from launch.drills.config import (
    AmaxOutlier,
    BitFlip,
    Drill,
    FrozenScale,
    KillRank,
    NonFiniteGradient,
    PoisonedBatch,
    SwigluGrowth,
    WeightSurge,
    duration,
)
from orchestrator.spec.completion import slots_per_node
from orchestrator.spec.errors import Finding, KeyPath, nearest
from orchestrator.spec.job import JobSpec
from parallel.parameter_names import built_in_names
from parallel.precision.recipes import ROLES, is_high_precision, linear_names

_SLOTS: tuple[KeyPath, ...] = (("num_nodes",), ("slots_per_node",), ("gpus_per_node",))


def check_drills(spec: JobSpec, broken: set[KeyPath]) -> Iterator[Finding]:
    """Findings of all drills; keys that are wrong in themselves (``broken``) are left alone."""
    dropped = {p[1] for p in broken if p[:1] == ("drills",) and len(p) > 1}
    if ("drills",) in broken:
        return
    indices = [i for i in range(len(spec.drills) + len(dropped)) if i not in dropped]
    for i, drill in zip(indices, spec.drills, strict=False):
        for finding in _findings(spec, drill, broken):
            yield Finding(("drills", i, *finding.path), finding.message, finding.remedy)


def _findings(spec: JobSpec, drill: Drill, broken: set[KeyPath]) -> Iterator[Finding]:
    """Findings of one drill, with paths inside it."""

    def known(*keys: KeyPath) -> bool:
        return not any(_overlap(path, key) for path in broken for key in keys)

    if known(("training", "steps")):
        yield from _steps(spec, drill)
    layers = spec.model.num_layers
    in_model = known(("model", "num_layers"), ("model", "factory"))
    match drill:
        case WeightSurge(layer=layer) | SwigluGrowth(layer=layer):
            if layer >= layers and known(("model", "num_layers")):
                message = f"the model has {layers} layers, numbered from 0"
                yield Finding(("layer",), message, f"make it at most {layers - 1}")
        case NonFiniteGradient(rank=rank) | KillRank(rank=rank):
            ranks = spec.num_nodes * slots_per_node(spec)
            if rank >= ranks and known(*_SLOTS):
                message = f"the job has {ranks} ranks, numbered from 0"
                yield Finding(("rank",), message, f"make it at most {ranks - 1}")
        case AmaxOutlier() | FrozenScale():
            if in_model and known(("fp8",), ("precision",)):
                yield from _operand(spec, drill)
        case BitFlip():
            if in_model and spec.model.factory is None:
                yield from _parameter(spec, drill.parameter)
            if known(*_SLOTS, ("parallelism",)):
                yield from _replicas(spec, drill.replica)
            if known(("replica_check_every",)):
                yield from _compared(spec, drill.step)


def _overlap(a: KeyPath, b: KeyPath) -> bool:
    n = min(len(a), len(b))
    return a[:n] == b[:n]


def _steps(spec: JobSpec, drill: Drill) -> Iterator[Finding]:
    steps = spec.training.steps
    if drill.step >= steps:
        message = f"the job ends after {steps} steps, numbered from 0"
        yield Finding(("step",), message, f"make it at most {steps - 1}")
    elif drill.step + duration(drill) > steps:
        key = "batches" if isinstance(drill, PoisonedBatch) else "steps"
        message = f"it lasts beyond the job's {steps} steps"
        yield Finding((key,), message, f"make it at most {steps - drill.step}")


def _operand(spec: JobSpec, drill: AmaxOutlier | FrozenScale) -> Iterator[Finding]:
    """Of an operand of an FP8 linear: whether there is one, and what it takes."""
    path: KeyPath = ("tensor",)
    linear, _, role = drill.tensor.rpartition("/")
    names = linear_names(spec.model.num_layers)
    known = role in ROLES and (spec.model.factory is not None or linear in names)
    if not known:
        operands = [f"{name}/{of}" for name in names for of in ROLES]
        remedy = nearest(drill.tensor, operands) or "operands are as layers.3.mlp.down/input"
        yield Finding(path, "no FP8 linear has an operand of this name", remedy)
    elif spec.precision == "bf16":
        yield Finding(path, "the job is in BF16, so nothing is quantized", "set precision: fp8")
    elif is_high_precision(linear, spec.fp8.high_precision_layers, spec.model.num_layers):
        remedy = "name another one, or keep fewer in fp8.high_precision_layers"
        yield Finding(path, f"{linear} stays in BF16", remedy)
    if spec.fp8.backend == "transformer_engine":
        message = "drills of FP8 operands are of Octavo's own numerics"
        yield Finding(("kind",), message, "set fp8.backend: native, or leave it out")
    if isinstance(drill, FrozenScale) and spec.fp8.recipe != "delayed":
        message = f"the {spec.fp8.recipe} recipe keeps no scale that could stand still"
        yield Finding(("kind",), message, "set fp8.recipe: delayed, or leave it out")


def _parameter(spec: JobSpec, name: str) -> Iterator[Finding]:
    names = built_in_names(spec.model)
    if name not in names:
        remedy = nearest(name, names) or "names are as layers.3.mlp.down.weight"
        yield Finding(("parameter",), "the model has no parameter of this name", remedy)


def _replicas(spec: JobSpec, replica: int) -> Iterator[Finding]:
    degrees = spec.parallelism
    ranks = spec.num_nodes * slots_per_node(spec)
    replicas = degrees.data or max(1, ranks // (degrees.tensor * degrees.pipeline))
    if replicas == 1:
        message = "the job has one replica, and a bit is told by comparing two"
        yield Finding(("kind",), message, "make parallelism.data at least 2")
    elif replica >= replicas:
        message = f"the job has {replicas} replicas, numbered from 0"
        yield Finding(("replica",), message, f"make it at most {replicas - 1}")


def _compared(spec: JobSpec, step: int) -> Iterator[Finding]:
    every = spec.replica_check_every
    if every == 0:
        message = "replicas are never compared (replica_check_every: 0), so nothing would see it"
        yield Finding(("kind",), message, "leave replica_check_every out")
    elif step % every:
        message = (
            f"a flipped bit lives until the next update, and replicas are compared every {every} "
            "steps only (replica_check_every)"
        )
        near = max(every, round(step / every) * every)
        yield Finding(("step",), message, f"make it {near}")
