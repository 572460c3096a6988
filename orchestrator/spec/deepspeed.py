"""The raw ``deepspeed:`` section of a spec, by the engine's own rules. Pure.

What may be set, and to what, is ``parallel.deepspeed_config``'s to say: the engine refuses
the same keys once nodes are taken. Here its answers get the spec's words, and keys that
DeepSpeed doesn't have are found.
"""

from __future__ import annotations

import difflib
from collections.abc import Collection, Iterator, Mapping
from typing import Any

from orchestrator.spec.completion import BatchRefusedError, batch_numbers, replicas
from orchestrator.spec.errors import Finding, KeyPath, value_at
from orchestrator.spec.job import JobSpec
from parallel.deepspeed_config import (
    ACCUMULATION,
    REFUSED,
    BatchShape,
    accumulation_dtype,
    contradictions,
    own_config,
)

ADDITIONS = (
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
    "compile",
    "aio",
)
"""Keys of DeepSpeed's configuration beside Octavo's own and those that it refuses."""

BATCH_KEYS = (
    "train_batch_size",
    "train_micro_batch_size_per_gpu",
    "gradient_accumulation_steps",
)

FIELDS: Mapping[str, str] = {
    **{key: f"training.{key}" for key in BATCH_KEYS},
    "gradient_clipping": "training.max_norm",
    "communication_data_type": "communication_data_type",
    "zero_optimization.stage": "parallelism.zero_stage",
}
"""DeepSpeed's key → the spec's field that says the same."""


def check_deepspeed(
    spec: JobSpec, broken: Collection[KeyPath] = (), *, batch_known: bool = True
) -> Iterator[Finding]:
    """Contradictions with the spec's own fields, and keys that DeepSpeed doesn't have.

    ``broken``: fields whose values are not the user's, so that nothing contradicts them;
    ``batch_known``: that the batch does not depend on any of these.
    """
    own = _own(spec, broken, batch_known)
    known = {
        *own,
        *(key.partition(".")[0] for key in FIELDS),
        *ADDITIONS,
        *(key.partition(".")[0] for key in REFUSED),
    }
    for key in spec.deepspeed:
        if key not in known:
            near = difflib.get_close_matches(key, sorted(known), n=1, cutoff=0.6)
            remedy = f"did you mean {near[0]!r}?" if near else ""
            message = "is no key of DeepSpeed's configuration that Octavo knows"
            yield Finding(("deepspeed", key), message, remedy)
    for found in contradictions(own, spec.deepspeed):
        keys: KeyPath = tuple(found.key.split("."))
        path: KeyPath = ("deepspeed", *keys)
        field = FIELDS.get(found.key)
        if found.key in REFUSED:
            yield Finding(path, "can't be honoured", found.reason)
        elif found.key == ACCUMULATION:
            yield Finding(path, "gradients are added up in fp32 or bf16", "make it one of the two")
        elif field is None:
            yield Finding(path, f"contradicts the engine: {found.reason}", "leave it out")
        else:
            message = f"contradicts {field}: {value_at(own, keys)}"
            yield Finding(path, message, f"leave it out, or change {field}")


def _own(spec: JobSpec, broken: Collection[KeyPath], batch_known: bool) -> dict[str, Any]:
    """What Octavo asks of DeepSpeed for this spec; without what can't be told yet."""
    training, data = spec.training, replicas(spec)
    batch: BatchShape | None = None
    if data is not None and batch_known:
        try:
            numbers = batch_numbers(training, data, spec.parallelism.pipeline)
            batch = BatchShape(numbers.micro, numbers.accumulation, data)
        except BatchRefusedError:
            # Has a finding of its own.
            pass
    own = own_config(
        batch or BatchShape(1, 1, 1),
        zero_stage=spec.parallelism.zero_stage,
        max_norm=training.max_norm,
        communication_data_type=spec.communication_data_type,
        accumulation=accumulation_dtype(spec.deepspeed),
    )
    if not batch:
        own = {key: own[key] for key in own if key not in BATCH_KEYS}
    for key, field in FIELDS.items():
        if tuple(field.split(".")) in broken:
            section, _, inner = key.partition(".")
            own.get(section, {}).pop(inner, None) if inner else own.pop(section, None)
    return own
