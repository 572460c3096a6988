"""The DeepSpeed configuration of a run, and what of it a user may change.

Promises: needs no torch, so that a spec is checked before any node is taken; the
configuration given to DeepSpeed is ours plus the user's additions, and an addition that
contradicts ours or that this engine cannot honour is an error, never dropped in silence.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal


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


OFFLOAD_KEYS = (
    "offload_optimizer",
    "offload_param",
    "cpu_offload",
    "cpu_offload_param",
)
"""DeepSpeed's keys for it, the last two deprecated ones."""

OFFLOAD = (
    "a rollback restores state in place on the device, and the optimizer steps there; to save "
    "memory set `parallelism.zero_stage: 1`, more tensor or pipeline ranks, or "
    "`training.recompute: full`"
)
"""Why none of them is offered, and what to do instead."""

REFUSED: Mapping[str, str] = {
    "optimizer": "AdamW is built from `training`; set lr, betas, eps and weight_decay there",
    "scheduler": "the learning rate comes from `training.schedule` and is part of rollbacks",
    "fp16": "weights are bf16 with fp32 masters",
    "amp": "weights are bf16 with fp32 masters",
    "torch_autocast": "weights are bf16 with fp32 masters",
    "prescale_gradients": "the gradient exchange always takes the mean",
    "gradient_predivide_factor": "the gradient exchange always takes the mean",
    "sparse_gradients": "the gradient exchange takes dense gradients",
    "tensor_parallel": "set `parallelism.tensor`",
    "sequence_parallel_size": "sequence parallelism is not supported",
    "data_parallel_size": "set `parallelism.data`",
    "elasticity": "node counts are the controller's; DeepSpeed refuses it with pipelines",
    "compression_training": "it rewrites linears, which the FP8 layers are",
    "hybrid_engine": "it replaces the engine whose gradient exchange is ours",
    "checkpoint": "Octavo writes the checkpoints; set `checkpoint`",
    "wandb": "Octavo writes the W&B run; set `wandb`",
    "tensorboard": "Octavo writes the metrics; set `wandb`",
    "csv_monitor": "Octavo writes the metrics; `octavo report -o json` gives them",
    "data_efficiency": "the order of the data is Octavo's, so that it can be replayed",
    "curriculum_learning": "the order of the data is Octavo's, so that it can be replayed",
    "activation_checkpointing": "set `training.recompute`",
    "pipeline.activation_checkpoint_interval": "set `training.recompute`",
    **{f"zero_optimization.{key}": OFFLOAD for key in OFFLOAD_KEYS},
    "zero_optimization.zenflow": "it bypasses the gradient exchange",
}
"""Keys that no value is right for, and why or where to set it instead."""


FIXED: Mapping[str, tuple[object, str]] = {
    "zero_optimization.compute_grad_norm": (
        True,
        "a step whose gradient norm is not finite is left out, and the norm is watched",
    ),
    "zero_optimization.zero_quantized_gradients": (
        False,
        "it is of ZeRO 3 and does nothing here; set `communication_data_type: fp8`",
    ),
    "zero_optimization.legacy_stage1": (False, "DeepSpeed has it no more"),
    "bf16.bf16_master_weights_and_grads": (False, "weights are bf16 with fp32 masters"),
    "bf16.bf16_optimizer_states": (False, "weights are bf16 with fp32 masters"),
}
"""Keys that DeepSpeed is not told, with their one value and why there is no other."""

OVERRIDABLE = frozenset({"steps_per_print", "timers"})
"""Keys of ours that the user's value replaces: what DeepSpeed prints and times."""

REPLACED = "communication_data_type"
"""Key that a user may repeat but DeepSpeed doesn't get: its own reduction never runs, and it
knows no fp8."""


ACCUMULATION = "data_types.grad_accum_dtype"
"""Key by which DeepSpeed chooses the class of its optimizer, and the user's to say.

    fp32   ZeRO 0, 1: BF16_Optimizer            ZeRO 2: DeepSpeedZeroOptimizer
    bf16   ZeRO 0: BF16_Optimizer            ZeRO 1, 2: DeepSpeedZeroOptimizer

Under bf16 gradients are added up over micro-batches, and handed to the optimizer, in BF16."""

_ACCUMULATION_NAMES: Mapping[object, Literal["fp32", "bf16"]] = {
    "fp32": "fp32",
    "float32": "fp32",
    "float": "fp32",
    "bf16": "bf16",
    "bfloat16": "bf16",
}

_BUCKETED: Mapping[str, Any] = {
    # Each bucket then comes as a whole to the one function that the exchange replaces, in the
    # same order on every replica and on the stream that computes.
    "reduce_scatter": False,
    "contiguous_gradients": True,
    "overlap_comm": False,
    "round_robin_gradients": False,
}
"""Of DeepSpeedZeroOptimizer."""


def accumulation_dtype(user: Mapping[str, Any]) -> Literal["fp32", "bf16"]:
    """What gradients are added up in, by the user's section; fp32 where it doesn't say."""
    section = user.get("data_types")
    asked = section.get("grad_accum_dtype") if isinstance(section, Mapping) else None
    return _ACCUMULATION_NAMES.get(asked, "fp32") if isinstance(asked, str) else "fp32"


def own_config(
    batch: BatchShape,
    *,
    zero_stage: int,
    max_norm: float,
    communication_data_type: str,
    accumulation: Literal["fp32", "bf16"] = "fp32",
) -> dict[str, Any]:
    """What Octavo itself asks of DeepSpeed."""
    bucketed = zero_stage == 2 or (zero_stage == 1 and accumulation == "bf16")
    return {
        REPLACED: communication_data_type,
        "train_batch_size": batch.train_batch_size,
        "train_micro_batch_size_per_gpu": batch.micro_batch_size,
        "gradient_accumulation_steps": batch.accumulation_steps,
        "gradient_clipping": max_norm,
        # DeepSpeedZeroOptimizer leaves a step out only where it is told to look.
        "bf16": {"enabled": True, **({"check_grad_overflow": True} if bucketed else {})},
        "data_types": {"grad_accum_dtype": accumulation},
        "zero_optimization": {"stage": zero_stage, **(_BUCKETED if bucketed else {})},
        # What passes between stages is replicated over tensor ranks; cutting it for the way
        # costs a gather on the other side.
        "pipeline": {"pipe_partitioned": False, "grad_partitioned": False},
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
            if key in OVERRIDABLE:
                continue
            if key == ACCUMULATION:
                if value != "auto" and not (
                    isinstance(value, str) and value in _ACCUMULATION_NAMES
                ):
                    found.append(Contradiction(key, value, "it is fp32 or bf16"))
                continue
            if key in FIXED:
                if value not in ("auto", FIXED[key][0]):
                    found.append(Contradiction(key, value, FIXED[key][1]))
            elif key in REFUSED:
                found.append(Contradiction(key, value, REFUSED[key]))
            elif name in ours and isinstance(ours[name], Mapping) and isinstance(value, Mapping):
                visit(ours[name], value, f"{key}.")
            elif name in ours and value not in ("auto", ours[name]):
                found.append(Contradiction(key, value, f"Octavo sets it to {ours[name]!r}"))

    visit(own, user, "")
    return found


def merged_config(own: Mapping[str, Any], user: Mapping[str, Any]) -> dict[str, Any]:
    """What DeepSpeed is given: ``own`` with the user's additions.

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
            elif name not in ours or name in OVERRIDABLE:
                result[name] = copy.deepcopy(value)
        return result

    config = merge(own, user)
    config.pop(REPLACED, None)
    if config.get("wall_clock_breakdown") and config.get("steps_per_print") is None:
        # The pipeline engine divides by it when it logs its timers.
        config["steps_per_print"] = 10
    return config
