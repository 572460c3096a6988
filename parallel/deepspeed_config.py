"""The DeepSpeed configuration of a run, and what of it a user may change.

Promises: needs no torch, so that a spec is checked before any node is taken; the
configuration given to DeepSpeed is ours plus the user's additions, and an addition that
contradicts ours or that this engine cannot honour is an error, never dropped in silence.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class BatchShape:
    """How a step's sequences are divided."""

    micro_batch_size: int
    """Sequences a micro-batch on one replica."""
    accumulation_steps: int
    """Micro-batches a step."""
    data_size: int
    """Replicas."""

    @property
    def train_batch_size(self) -> int:
        """Sequences a step over all replicas."""
        return self.micro_batch_size * self.accumulation_steps * self.data_size


@dataclass(frozen=True, slots=True)
class Contradiction:
    """A key of the user's ``deepspeed`` section that cannot be honoured."""

    key: str
    """Path with dots, as ``zero_optimization.stage``."""
    value: object
    reason: str


REFUSED: Mapping[str, str] = {
    "optimizer": "AdamW is built from `training`; set lr, betas, eps and weight_decay there",
    "scheduler": "the learning rate comes from `training.schedule` and is part of rollbacks",
    "fp16": "weights are bf16 with fp32 masters",
    "amp": "weights are bf16 with fp32 masters",
    "torch_autocast": "weights are bf16 with fp32 masters",
    "communication_data_type": "set `communication_data_type` at the top of the spec",
    "tensor_parallel": "set `parallelism.tensor`",
    "sequence_parallel_size": "sequence parallelism is not supported",
    "data_parallel_size": "set `parallelism.data`",
    "elasticity": "node counts are the controller's; DeepSpeed refuses it with pipelines",
    "compression_training": "it rewrites linears, which the FP8 layers are",
    "hybrid_engine": "it replaces the engine whose gradient exchange is ours",
    "zero_optimization.offload_optimizer": "offloaded state cannot be restored in place",
    "zero_optimization.offload_param": "offloaded state cannot be restored in place",
    "zero_optimization.zenflow": "it bypasses the gradient exchange",
    "zero_force_ds_cpu_optimizer": "AdamW is built from `training`",
}
"""Keys that no value is right for, and why or where to set it instead."""


def own_config(batch: BatchShape, *, zero_stage: int, max_norm: float) -> dict[str, Any]:
    """What Octavo itself asks of DeepSpeed."""
    return {
        "train_batch_size": batch.train_batch_size,
        "train_micro_batch_size_per_gpu": batch.micro_batch_size,
        "gradient_accumulation_steps": batch.accumulation_steps,
        "gradient_clipping": max_norm,
        "bf16": {"enabled": True},
        # With FP32 accumulation DeepSpeed chooses BF16_Optimizer, whose gradients are one flat
        # buffer a parameter group and pass through the hook that the exchange hangs on.
        "data_types": {"grad_accum_dtype": "fp32"},
        "zero_optimization": {"stage": zero_stage},
        # DeepSpeed's own progress lines and throughput timer: the latter waits for the device
        # every micro-batch.
        "steps_per_print": None,
        "timers": {"throughput": {"enabled": False}},
    }


def contradictions(own: Mapping[str, Any], user: Mapping[str, Any]) -> list[Contradiction]:
    """Every key of ``user`` that is refused or differs from ``own``, in the user's order."""
    found: list[Contradiction] = []

    def visit(ours: Mapping[str, Any], theirs: Mapping[str, Any], prefix: str) -> None:
        for name, value in theirs.items():
            key = f"{prefix}{name}"
            if key in REFUSED:
                found.append(Contradiction(key, value, REFUSED[key]))
            elif name in ours and isinstance(ours[name], Mapping) and isinstance(value, Mapping):
                visit(ours[name], value, f"{key}.")
            elif name in ours and value not in ("auto", ours[name]):
                found.append(Contradiction(key, value, f"Octavo sets it to {ours[name]!r}"))

    visit(own, user, "")
    return found


def merged_config(own: Mapping[str, Any], user: Mapping[str, Any]) -> dict[str, Any]:
    """``own`` with the user's additions.

    Raises ValueError that names every contradiction.
    """
    problems = contradictions(own, user)
    if problems:
        raise ValueError(
            "deepspeed: " + "; ".join(f"{p.key}={p.value!r}: {p.reason}" for p in problems)
        )

    def merge(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> dict[str, Any]:
        result = copy.deepcopy(dict(ours))
        for name, value in theirs.items():
            if isinstance(value, Mapping) and isinstance(result.get(name), Mapping):
                result[name] = merge(result[name], value)
            elif name not in ours:
                result[name] = copy.deepcopy(value)
        return result

    return merge(own, user)
