"""The raw ``deepspeed:`` section against the fields that say the same: contradictions. Pure.

A key that repeats a field with the same value is let pass; keys of what Octavo does itself
(optimizer, schedule, precision) are refused with the field to use.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator

from orchestrator.spec import JobSpec
from orchestrator.spec_completion import BatchRefusedError, batch_numbers, replicas
from orchestrator.spec_errors import Finding, KeyPath, value_at
from parallel.deepspeed_config import REFUSED

OWNED = {
    "optimizer": "training.lr, betas, eps and weight_decay",
    "scheduler": "training.schedule and warmup_steps",
    "fp16": "precision",
    "amp": "precision",
    "elasticity": "num_nodes and parallelism.data",
    "checkpoint": "checkpoint",
    "wandb": "wandb",
    "tensorboard": "wandb",
    "csv_monitor": "summary.json",
    "compression_training": "precision",
    "data_efficiency": "data",
    "curriculum_learning": "data",
    "sparse_gradients": "communication_data_type",
    "tensor_parallel": "parallelism.tensor",
}
"""DeepSpeed sections that Octavo writes itself, and the spec's word for them."""

MERGED = (
    "train_batch_size",
    "train_micro_batch_size_per_gpu",
    "gradient_accumulation_steps",
    "gradient_clipping",
    "communication_data_type",
    "zero_optimization",
    "bf16",
    "data_types",
    "steps_per_print",
    "wall_clock_breakdown",
    "memory_breakdown",
    "dump_state",
    "comms_logger",
    "flops_profiler",
    "activation_checkpointing",
    "pipeline",
    "seq_parallel_communication_data_type",
    "zero_allow_untested_optimizer",
    "zero_force_ds_cpu_optimizer",
    "disable_allgather",
    "timers",
    "compile",
    "aio",
)
"""Keys of DeepSpeed's configuration that may be merged in."""


def check_deepspeed(spec: JobSpec) -> Iterator[Finding]:
    """Contradictions with the spec's own fields, and keys that DeepSpeed doesn't have."""
    given = spec.deepspeed
    for key in given:
        path: KeyPath = ("deepspeed", key)
        if key in OWNED:
            yield Finding(path, "is written by Octavo", f"use {OWNED[key]} instead")
        elif key not in MERGED and key not in REFUSED:
            near = difflib.get_close_matches(key, [*MERGED, *OWNED], n=1, cutoff=0.6)
            remedy = f"did you mean {near[0]!r}?" if near else ""
            yield Finding(path, "is no key of DeepSpeed's configuration that Octavo knows", remedy)
    yield from _refused_by_engine(spec)
    for path, field, wanted in _equivalents(spec):
        value = value_at(given, path)
        if value is not None and value != wanted:
            message = f"contradicts {field}: {wanted}"
            yield Finding(("deepspeed", *path), message, f"leave it out, or change {field}")


def _refused_by_engine(spec: JobSpec) -> Iterator[Finding]:
    """What the engine itself would refuse once nodes are taken, where no rule above says it."""
    for key, reason in REFUSED.items():
        path = tuple(key.split("."))
        if path[0] not in OWNED and value_at(spec.deepspeed, path) is not None:
            yield Finding(("deepspeed", *path), "can't be honoured", reason)


def _equivalents(spec: JobSpec) -> Iterator[tuple[KeyPath, str, object]]:
    """(DeepSpeed's key, the spec's field, its value)."""
    training = spec.training
    data = replicas(spec)
    if data is not None:
        try:
            batch = batch_numbers(training, data, spec.parallelism.pipeline)
        except BatchRefusedError:
            pass
        else:
            yield ("train_batch_size",), "training.train_batch_size", batch.total
            micro = "train_micro_batch_size_per_gpu"
            yield (micro,), f"training.{micro}", batch.micro
            accumulation = "gradient_accumulation_steps"
            yield (accumulation,), f"training.{accumulation}", batch.accumulation
    yield ("gradient_clipping",), "training.max_norm", training.max_norm
    dtype = spec.communication_data_type
    yield ("communication_data_type",), "communication_data_type", dtype
    yield ("zero_optimization", "stage"), "parallelism.zero_stage", spec.parallelism.zero_stage
    yield ("bf16", "enabled"), "the engine's own", True
    yield ("data_types", "grad_accum_dtype"), "the engine's own", "fp32"
