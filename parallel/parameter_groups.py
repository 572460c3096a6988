"""Which parameters share one flat buffer, and what is done to each buffer.

DeepSpeed's BF16_Optimizer keeps one flat tensor a parameter group, and the gradient exchange
takes it whole. So what must be treated alike is one group, and what must stay equal on ranks
that hold otherwise different parameters is a group of its own: in a buffer shared with other
values, blocks of the exchange and the lanes of a fused optimizer would straddle both, and
copies would drift apart by last bits.

    matrices   everything with two dimensions or more that is neither of the next two
    shared     matrices that all tensor ranks hold whole (embedding, head)
    tied       matrices that two pipeline stages hold (tied embeddings)
    vectors    the rest: norm weights and biases

Vectors take no weight decay and are exchanged in FP32: a few hundred thousandths of the
bytes, and every element of a norm matters. Of the first three those that the spec names in
``high_precision_parameters`` are groups of their own, exchanged in BF16 at least.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from parallel import engine_state
from parallel.config import GradientExchangeConfig
from parallel.gradients import ExchangeDtype, GradientExchange
from parallel.model_plan import LayerPlan, parameter_name
from parallel.parameter_names import is_matched
from parallel.step_hooks import GradientGroup, goes_scattered
from parallel.tensor import TensorGroup, is_sharded

logger = logging.getLogger(__name__)

MATRICES = ("matrices", "shared", "tied")
HIGH_PRECISION = "high_precision_"
"""Before the name of a group of matrices: that of its high-precision parameters."""


@dataclass(frozen=True, slots=True)
class ParameterGroup:
    """Parameters of one flat buffer, in its order."""

    name: str
    parameters: tuple[nn.Parameter, ...]
    matrices: bool
    """Decayed by the optimizer."""
    counted: bool
    """Whether DeepSpeed counts this rank's copy in the gradient norm."""
    least: ExchangeDtype
    """What its gradients are exchanged in at least."""


def parameter_groups(
    module: nn.Module,
    tensor: TensorGroup | None,
    layers: Sequence[LayerPlan],
    high_precision: Sequence[str] = (),
) -> tuple[ParameterGroup, ...]:
    """The groups of this rank's module that have parameters.

    The first is counted in the norm on every rank. ``high_precision``: patterns of the names of
    matrices to be exchanged in BF16 at least. Raises ValueError for a module without matrices,
    or without sharded ones over tensor ranks: they would all train the same thing.
    """
    tied_modules = getattr(module, "tied_modules", None)
    tied = {id(p) for p in tied_modules.parameters()} if tied_modules is not None else set()
    found: dict[str, list[nn.Parameter]] = {
        f"{kept}{name}": [] for name in MATRICES for kept in ("", HIGH_PRECISION)
    }
    found["vectors"] = []
    for qualified, parameter in module.named_parameters():
        if not parameter.requires_grad:
            continue
        if id(parameter) in tied:
            name = "tied"
        elif parameter.dim() < 2:
            found["vectors"].append(parameter)
            continue
        else:
            whole = tensor is not None and not is_sharded(parameter)
            name = "shared" if whole else "matrices"
        kept = is_matched(parameter_name(qualified, layers), high_precision)
        found[f"{HIGH_PRECISION if kept else ''}{name}"].append(parameter)
    if not found["matrices"] and not found[f"{HIGH_PRECISION}matrices"]:
        sharded = "" if tensor is None else f" that is sharded over its {tensor.size} tensor ranks"
        raise ValueError(f"a pipeline stage has no matrix{sharded}")
    return tuple(
        ParameterGroup(
            name,
            tuple(parameters),
            matrices=name != "vectors",
            counted=all(is_counted(p, tensor) for p in parameters),
            least=_least(name),
        )
        for name, parameters in found.items()
        if parameters
    )


def _least(name: str) -> ExchangeDtype:
    if name == "vectors":
        return "fp32"
    return "bf16" if name.startswith(HIGH_PRECISION) else "fp8"


def is_counted(parameter: nn.Parameter, tensor: TensorGroup | None) -> bool:
    """DeepSpeed's rule: each shard, else the first tensor rank's; of tied ones the first's."""
    if getattr(parameter, "ds_pipe_replicated", False):
        return False
    return tensor is None or tensor.index == 0 or is_sharded(parameter)


def adamw(
    groups: Sequence[ParameterGroup],
    *,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
) -> torch.optim.AdamW:
    """The optimizer of the groups; the learning rate is set every step."""
    described: list[dict[str, Any]] = [
        {
            "name": group.name,
            "params": list(group.parameters),
            "weight_decay": weight_decay if group.matrices else 0.0,
        }
        for group in groups
    ]
    # Fused: one pass over the state, nine times faster on CPU.
    return torch.optim.AdamW(described, lr=0.0, betas=betas, eps=eps, fused=True)


def gradient_groups(
    engine: Any,
    groups: Sequence[ParameterGroup],
    layers: Sequence[LayerPlan],
    *,
    dtype: ExchangeDtype,
    config: GradientExchangeConfig,
    replicas: dist.ProcessGroup,
    tensor: TensorGroup | None,
    device: torch.device,
) -> tuple[GradientGroup, ...]:
    """The groups with their exchanges, after one of DeepSpeed's optimizers has flattened them.

    BF16_Optimizer has flat gradients; where it is sharded over the replicas, so is the mean.
    DeepSpeedZeroOptimizer has buckets, whose parts are for their owners alone.
    """
    optimizer = engine.optimizer
    bucketed = engine_state.takes_buckets(optimizer)
    ranks = dist.get_world_size(replicas)
    scattered = not bucketed and dist.get_world_size(optimizer.dp_process_group) > 1
    result = []
    for i, group in enumerate(groups):
        if bucketed:
            partition = int(optimizer.partition_size[i])
            bucket = min(ranks * partition, int(optimizer.reduce_bucket_size))
            views: tuple[Tensor, ...] = ()
            numel = ranks * partition
            by_parts = goes_scattered(ranks, min(partition, bucket), bucket)
        else:
            partition, by_parts = 0, scattered
            views = tuple(optimizer.fp32_groups_gradients[i])
            numel = optimizer.fp32_groups_gradients_flat[i].numel()
        exchange = GradientExchange(dtype, config, replicas, device, scattered=by_parts)
        # The residual is state: a snapshot of the first step must hold it.
        feedback = config.error_feedback and group.least == "fp8" and ranks > 1
        made = GradientGroup(
            name=group.name,
            exchange=exchange,
            parameters=tuple(
                parameter_name(engine.param_names[p], layers) for p in group.parameters
            ),
            views=views,
            numel=numel,
            partition=partition,
            least=group.least,
            residual=torch.zeros(numel, dtype=torch.float32, device=device) if feedback else None,
            counted=group.counted,
            owned=_owned(optimizer, i, tensor) if scattered else None,
        )
        made.take_dtype(dtype)
        result.append(made)
    if ranks > 1:
        logger.info("gradients of a step: %s", "; ".join(_told(group, config) for group in result))
    return tuple(result)


def _told(group: GradientGroup, config: GradientExchangeConfig) -> str:
    """What a group is exchanged in, for the log."""
    dtype, numel = group.exchange.dtype, group.numel
    told = f"{numel:,} of {group.name} in {dtype.upper()}"
    if dtype == "fp8" and numel < config.min_size:
        return (
            f"{numel:,} of {group.name} in BF16 (gradient_exchange.min_size = {config.min_size:,})"
        )
    if dtype == "fp8":
        feedback = ", error feedback" if group.residual is not None else ""
        return f"{told} ({config.format}, blocks of {config.block}{feedback})"
    return told


def _owned(optimizer: Any, i: int, tensor: TensorGroup | None) -> tuple[Tensor, ...]:
    """The parts of counted gradients in this rank's partition of group ``i``, live."""
    partition = optimizer.fp32_groups_gradient_flat_partition[i]
    # DeepSpeed maps the parameters that have elements in this rank's partition, and no others.
    mapped = [p for p in optimizer.bf16_groups[i] if p._hp_mapping is not None]
    places = [p._hp_mapping.get_hp_fragment_address() for p in mapped if is_counted(p, tensor)]
    return tuple(partition.narrow(0, place.start, place.numel) for place in places)
