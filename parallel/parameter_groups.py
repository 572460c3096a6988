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

Vectors take no weight decay and are exchanged uncompressed: a few hundred thousandths of the
bytes, and every element of a norm matters.
"""

from __future__ import annotations

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
from parallel.step_hooks import GradientGroup
from parallel.tensor import TensorGroup, is_sharded

GROUPS = ("matrices", "shared", "tied", "vectors")


@dataclass(frozen=True, slots=True)
class ParameterGroup:
    """Parameters of one flat buffer, in its order."""

    name: str
    parameters: tuple[nn.Parameter, ...]
    matrices: bool
    """Decayed by the optimizer and compressed by the exchange."""
    counted: bool
    """Whether DeepSpeed counts this rank's copy in the gradient norm."""


def parameter_groups(module: nn.Module, tensor: TensorGroup | None) -> tuple[ParameterGroup, ...]:
    """The groups of this rank's module that have parameters; ``matrices`` comes first.

    Raises ValueError for a module without matrices, or without sharded ones over tensor
    ranks: they would all train the same thing.
    """
    tied_modules = getattr(module, "tied_modules", None)
    tied = {id(p) for p in tied_modules.parameters()} if tied_modules is not None else set()
    found: dict[str, list[nn.Parameter]] = {
        n: [] for n in ("matrices", "shared", "tied", "vectors")
    }
    for parameter in module.parameters():
        if not parameter.requires_grad:
            continue
        if id(parameter) in tied:
            found["tied"].append(parameter)
        elif parameter.dim() < 2:
            found["vectors"].append(parameter)
        else:
            whole = tensor is not None and not is_sharded(parameter)
            found["shared" if whole else "matrices"].append(parameter)
    if not found["matrices"]:
        sharded = "" if tensor is None else f" that is sharded over its {tensor.size} tensor ranks"
        raise ValueError(f"a pipeline stage has no matrix{sharded}")
    return tuple(
        ParameterGroup(
            name,
            tuple(parameters),
            matrices=name != "vectors",
            counted=all(_counted(p, tensor) for p in parameters),
        )
        for name, parameters in found.items()
        if parameters
    )


def _counted(parameter: nn.Parameter, tensor: TensorGroup | None) -> bool:
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
    """The flat gradients of DeepSpeed's BF16_Optimizer, each with its exchange.

    Where that optimizer is sharded over the replicas, so is the mean. Under ZeRO 2, where
    there are no flat gradients, a group has its exchange alone.
    """
    optimizer = engine.optimizer
    if engine_state.shards_gradients(optimizer):
        return tuple(
            GradientGroup(
                name=group.name,
                exchange=GradientExchange(
                    dtype if group.matrices else "fp32", config, replicas, device
                ),
                parameters=tuple(
                    parameter_name(engine.param_names[p], layers) for p in group.parameters
                ),
                views=(),
                numel=sum(p.numel() for p in group.parameters),
                partition=int(optimizer.partition_size[i]),
                compressed=group.matrices,
            )
            for i, group in enumerate(groups)
        )
    scattered = dist.get_world_size(optimizer.dp_process_group) > 1
    result = []
    for i, group in enumerate(groups):
        exchange = GradientExchange(
            dtype if group.matrices else "fp32", config, replicas, device, scattered=scattered
        )
        if config.error_feedback and group.matrices:
            # The residual is state: a snapshot of the first step must hold it.
            exchange.reserve(optimizer.fp32_groups_gradients_flat[i].numel())
        result.append(
            GradientGroup(
                name=group.name,
                exchange=exchange,
                parameters=tuple(
                    parameter_name(engine.param_names[p], layers) for p in optimizer.bf16_groups[i]
                ),
                views=tuple(optimizer.fp32_groups_gradients[i]),
                numel=sum(p.numel() for p in group.parameters),
                compressed=group.matrices,
                counted=group.counted,
                owned=_owned(optimizer, i, tensor) if scattered else None,
            )
        )
    return tuple(result)


def _owned(optimizer: Any, i: int, tensor: TensorGroup | None) -> tuple[Tensor, ...]:
    """The parts of counted gradients in this rank's partition of group ``i``, live."""
    partition = optimizer.fp32_groups_gradient_flat_partition[i]
    # DeepSpeed maps the parameters that have elements in this rank's partition, and no others.
    mapped = [p for p in optimizer.bf16_groups[i] if p._hp_mapping is not None]
    places = [p._hp_mapping.get_hp_fragment_address() for p in mapped if _counted(p, tensor)]
    return tuple(partition.narrow(0, place.start, place.numel) for place in places)
