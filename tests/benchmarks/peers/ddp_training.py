"""What a user of DistributedDataParallel would train with, and its communication hooks.

    training = DDPTraining(run, Hook("powersgd", rank=4, starts=24))
    loss = training.train_step(micro_batches, lr)

After PyTorch's pages "DDP Communication Hooks" and "Automatic Mixed Precision": FP32 parameters,
linears in BF16 by autocast, gradients accumulated under ``no_sync`` and exchanged with the last
micro-batch's backward pass, buckets as views of them. Model, initial weights, optimizer and its
groups are Octavo's own. Promises: what ``train_step`` returns is the mean loss over micro-batches
and replicas, as Octavo's engine has it.

Two things stand between the hooks and gloo in torch 2.13, and are gone round as a user would:

- DDP refuses ``bf16_compress_hook`` by its name where there is no NCCL ("BF16 all reduce
  communication hook required CUDA 11+ and NCCL 2.10+ or XPU and XCCL"), though gloo sums BF16.
  Here the hook itself is called, by a function of another name.
- PowerSGD's hook sends its second and third all-reduce from callbacks, whose order over several
  buckets is another on each rank: gloo then ends the process ("Received data size doesn't match
  expected size"). So its gradients are one bucket, and nothing of its exchange overlaps.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

from orchestrator.spec.job import JobSpec
from parallel.config import FP8Config
from parallel.engine import MicroBatch
from parallel.parameter_groups import adamw, parameter_groups
from parallel.precision.scope import PrecisionScope
from parallel.transformer import layer_plans, loss_fn

FIRST_START = 2
"""The least ``start_powerSGD_iter`` that DDP allows with error feedback and warm start."""


@dataclass(frozen=True, slots=True)
class Hook:
    """How gradients are exchanged."""

    kind: Literal["fp32", "bf16", "powersgd"]
    """``fp32``: DDP's own all-reduce."""
    rank: int = 0
    """PowerSGD's ``matrix_approximation_rank``."""
    starts: int = FIRST_START
    """Steps that are all-reduced whole before PowerSGD begins."""


class DDPTraining:
    """One rank's; the default process group must exist, every rank makes one."""

    def __init__(self, run: JobSpec, hook: Hook) -> None:
        training = run.training
        scope = PrecisionScope("bf16", FP8Config(), num_layers=run.model.num_layers)
        plans = layer_plans(run.model, seq_len=training.seq_len, seed=training.seed, scope=scope)
        self._module = nn.Sequential(*(plan.build() for plan in plans)).float()
        self._optimizer = adamw(
            parameter_groups(self._module, None, plans),
            betas=training.betas,
            eps=training.eps,
            weight_decay=training.weight_decay,
        )
        self._max_norm = training.max_norm
        count = training.gradient_accumulation_steps
        assert count is not None
        self._count = count
        options = {} if hook.kind != "powersgd" else {"bucket_cap_mb": _whole_mb(self._module)}
        self._ddp = DistributedDataParallel(self._module, gradient_as_bucket_view=True, **options)
        if hook.kind == "bf16":
            # By another name than the one that is refused.
            self._ddp.register_comm_hook(
                None, lambda state, bucket: default_hooks.bf16_compress_hook(state, bucket)
            )
        elif hook.kind == "powersgd":
            state = powerSGD_hook.PowerSGDState(
                None,
                matrix_approximation_rank=hook.rank,
                start_powerSGD_iter=max(FIRST_START, hook.starts),
            )
            self._ddp.register_comm_hook(state, powerSGD_hook.powerSGD_hook)

    def train_step(self, micro_batches: Iterator[MicroBatch], lr: float) -> float:
        """One step; the mean loss over micro-batches and replicas."""
        for group in self._optimizer.param_groups:
            group["lr"] = lr
        total = torch.zeros(())
        for i in range(self._count):
            tokens, targets = next(micro_batches)
            last = i == self._count - 1
            with contextlib.nullcontext() if last else self._ddp.no_sync():
                with torch.autocast("cpu", torch.bfloat16):
                    output = self._ddp(tokens)
                loss = loss_fn(output, targets)
                (loss / self._count).backward()
            total += loss.detach()
        nn.utils.clip_grad_norm_(self._module.parameters(), self._max_norm)
        self._optimizer.step()
        self._optimizer.zero_grad()
        dist.all_reduce(total)
        return float(total) / self._count / dist.get_world_size()


def _whole_mb(module: nn.Module) -> int:
    """Bucket size that takes all gradients, with room for one more."""
    return 1 + sum(p.numel() * p.element_size() for p in module.parameters()) // 2**20
