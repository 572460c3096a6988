"""The state of an engine as named live tensors, and the rest as JSON.

Promises: the tensors are the ones the engine computes with, not copies. Copying all of them
out, and later back in place together with ``load_counters``, brings training back to the bit:
BF16 parameters, FP32 master weights, Adam's moments and step numbers. Gradients aren't state:
at a step boundary their buffers are zero. Names are stable for one layout of ranks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import AdamW

from parallel.layout import Group, Place
from parallel.tensor import cut_of, is_sharded

COUNTERS = ("global_steps", "global_samples", "micro_steps", "skipped_steps")
"""Attributes of a DeepSpeed engine that count."""


def create_moments(optimizer: AdamW) -> None:
    """Give every parameter the state that AdamW would make in its first step.

    Without it a snapshot taken before step 0 would have no moments to go back to.
    """
    for group in optimizer.param_groups:
        on_device = bool(group.get("fused") or group.get("capturable"))
        for parameter in group["params"]:
            optimizer.state[parameter] = {
                "step": torch.zeros(
                    (), dtype=torch.float32, device=parameter.device if on_device else "cpu"
                ),
                "exp_avg": torch.zeros_like(parameter),
                "exp_avg_sq": torch.zeros_like(parameter),
            }


def takes_buckets(optimizer: Any) -> bool:
    """Whether it is DeepSpeedZeroOptimizer, and not BF16_Optimizer."""
    return hasattr(optimizer, "single_partition_of_fp32_groups")


def optimizer_tensors(optimizer: Any, group_names: Sequence[str]) -> dict[str, Tensor]:
    """Live tensors of one of DeepSpeed's optimizers over AdamW, by ``{group}.{what}``."""
    tensors: dict[str, Tensor] = {}
    if takes_buckets(optimizer):
        masters, flats = optimizer.single_partition_of_fp32_groups, optimizer.bit16_groups_flat
    else:
        masters, flats = optimizer.fp32_groups_flat_partition, optimizer.bf16_groups_flat
    for name, master, flat in zip(group_names, masters, flats, strict=True):
        state = optimizer.optimizer.state[master]
        # Flattening a single parameter gives a view of it, which autograd guards.
        tensors[f"{name}.parameters"] = flat.detach()
        tensors[f"{name}.masters"] = master.detach()
        tensors |= {f"{name}.{what}": state[what] for what in ("exp_avg", "exp_avg_sq", "step")}
    return tensors


def group_layouts(
    optimizer: Any,
    grouped: Sequence[tuple[str, Sequence[tuple[str, Tensor]]]],
    replica: int,
) -> tuple[Group, ...]:
    """Where each parameter lies in the tensors of ``optimizer_tensors``.

    ``grouped``: name of each group, names and parameters in it; ``replica``: this rank's. Raises
    RuntimeError where DeepSpeed's own book has a master elsewhere.
    """
    bucketed = takes_buckets(optimizer)
    masters = (
        optimizer.single_partition_of_fp32_groups
        if bucketed
        else optimizer.fp32_groups_flat_partition
    )
    flats = optimizer.bit16_groups_flat if bucketed else optimizer.bf16_groups_flat
    found = []
    for (name, parameters), master, flat in zip(grouped, masters, flats, strict=True):
        parts = flat.numel() // master.numel()
        places = tuple(
            Place(
                told,
                tuple(parameter.shape),
                (parameter.data_ptr() - flat.data_ptr()) // flat.itemsize,
                cut_of(parameter),
                is_sharded(parameter),
            )
            for told, parameter in parameters
        )
        part = replica if parts > 1 else 0
        group = Group(name, places, master.numel(), part, parts)
        for (told, parameter), place in zip(parameters, places, strict=True):
            mapping = parameter._hp_mapping  # type: ignore[attr-defined]
            if mapping is None:
                continue
            here = part * master.numel() + mapping.hp_fragment_address.start
            if here != place.start + mapping.lp_fragment_address.start:
                raise RuntimeError(f"DeepSpeed keeps the master of {told} elsewhere than expected")
        found.append(group)
    return tuple(found)


def master_piece(parameter: Tensor) -> Tensor | None:
    """The part of a parameter's FP32 master weights that this rank holds, live; or None."""
    mapping = getattr(parameter, "_hp_mapping", None)
    return None if mapping is None else mapping.hp_fragment


def master_offset(parameter: Tensor) -> int:
    """Where ``master_piece`` begins in the parameter, in elements; only where there is one."""
    start: int = parameter._hp_mapping.lp_fragment_address.start  # type: ignore[attr-defined]
    return start


def counters(engine: Any) -> dict[str, int]:
    """DeepSpeed's counters."""
    return {name: int(getattr(engine, name)) for name in COUNTERS}


def load_counters(engine: Any, values: Mapping[str, int]) -> None:
    """Set DeepSpeed's counters back."""
    for name in COUNTERS:
        setattr(engine, name, int(values[name]))
