"""Tensor parallelism: ranks that share the matrices of a layer, each holding a shard.

A ``column`` shard has some of a matrix's outputs (rows of the weight) and needs the whole
input; a ``row`` shard has some of its inputs and makes a part of a sum. A pair of them, column
then row, needs one all-reduce forward (after the row) and one backward (before the column)::

    y = sum_of_shards(row(f(column(copy_to_shards(x)))))

Promises: what comes out of ``sum_of_shards``, and every gradient that ``copy_to_shards``
hands back, has the same bits on all ranks of the group, so that whatever is computed between
such pairs (norms, residual stream, embedding, head) stays replicated without being exchanged.
Sums travel in the dtype of the tensor, BF16 in training, as Megatron's and Transformer
Engine's do. A sharded parameter carries ``model_parallel = True``: DeepSpeed then counts every
shard in the gradient norm, and replicated parameters on the first tensor rank alone.

Scales that follow from the tensor at hand (current, block and mxfp8 scaling) are those of this
rank's shard; delayed scales are those of all ranks of the stage, from the reduced amax. So does
Transformer Engine without sequence parallelism.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from parallel.layout import Cut, ShardKind
from parallel.precision.recipes import UnfitLinearError

__all__ = ["ShardKind"]


@dataclass(frozen=True, slots=True)
class TensorGroup:
    """The ranks that share this rank's matrices, and which of them this is."""

    group: dist.ProcessGroup
    index: int
    """This rank's shard, from 0."""
    size: int
    """Shards."""


@dataclass(frozen=True, slots=True)
class Shard:
    """This rank's part of one linear."""

    kind: ShardKind
    tensor: TensorGroup

    def features(self, name: str, in_features: int, out_features: int) -> tuple[int, int]:
        """Inputs and outputs of the shard of an in × out matrix.

        Raises UnfitLinearError when the sharded ones can't be divided evenly.
        """
        size = self.tensor.size
        sharded = out_features if self.kind == "column" else in_features
        if sharded % size:
            side = "outputs" if self.kind == "column" else "inputs"
            message = f"{sharded} {side} over {size} tensor ranks"
            raise UnfitLinearError(name, message, "choose parallelism.tensor to divide them")
        if self.kind == "column":
            return in_features, out_features // size
        return in_features // size, out_features

    def run(self, product: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        """``product`` of this shard with what its kind needs before or after it."""
        if self.kind == "column":
            return product(copy_to_shards(x, self.tensor))
        return sum_of_shards(product(x), self.tensor)


def shard_of(tensor: TensorGroup | None, kind: ShardKind | None) -> Shard | None:
    """The shard of a linear of ``kind``; None where nothing is shared."""
    return None if tensor is None or kind is None else Shard(kind, tensor)


def mark_sharded(parameter: Tensor) -> None:
    """Tell DeepSpeed that every tensor rank holds another part of this parameter."""
    parameter.model_parallel = True  # type: ignore[attr-defined]


def note_cut(
    parameter: Tensor, kind: ShardKind, tensor: TensorGroup, sections: Sequence[int] = ()
) -> None:
    """Say which part of its matrix a sharded parameter is, for whoever divides it anew."""
    cut = Cut(kind, tensor.index, tensor.size, tuple(sections))
    parameter.octavo_cut = cut  # type: ignore[attr-defined]


def cut_of(parameter: Tensor) -> Cut | None:
    """What ``note_cut`` said of it; None where nobody did."""
    cut: Cut | None = getattr(parameter, "octavo_cut", None)
    return cut


def is_sharded(parameter: Tensor) -> bool:
    """Whether tensor ranks hold different parts (marked by us or by Transformer Engine)."""
    return bool(
        getattr(parameter, "model_parallel", False)
        or getattr(parameter, "tensor_model_parallel", False)
    )


def copy_to_shards(x: Tensor, tensor: TensorGroup) -> Tensor:
    """``x`` as it is; its gradient is the sum over the group."""
    result: Tensor = _CopyToShards.apply(x, tensor.group)
    return result


def sum_of_shards(x: Tensor, tensor: TensorGroup) -> Tensor:
    """The sum over the group; the gradient is handed back as it is."""
    result: Tensor = _SumOfShards.apply(x, tensor.group)
    return result


def slice_weight(
    whole: Tensor, kind: ShardKind, index: int, size: int, sections: Sequence[int] = ()
) -> Tensor:
    """Part ``index`` of ``size`` of a weight [outputs, inputs], as a new tensor.

    ``sections`` are heights of blocks of rows that are divided each by itself (a column
    shard of queries, keys and values has some of each); empty: one block.
    """
    if kind == "row":
        return whole.chunk(size, dim=1)[index].clone()
    blocks = whole.split(tuple(sections) or whole.shape[0])
    return torch.cat([block.chunk(size)[index] for block in blocks])


@dataclass(frozen=True, slots=True)
class WholeMatrix:
    """A linear whose weight is the whole matrix for now, while initial weights are drawn."""

    name: str
    linear: nn.Linear
    shard: Shard
    shape: tuple[int, int]
    """Outputs and inputs of the matrix."""
    sections: tuple[int, ...]
    """As in ``slice_weight``."""

    @torch.no_grad()
    def cut(self) -> None:
        """Leave the linear this rank's part, in the same parameter, marked as sharded.

        Raises ValueError where its weight has another shape than the matrix, and where sections
        can't be divided.
        """
        weight, tensor = self.linear.weight, self.shard.tensor
        if tuple(weight.shape) != self.shape:
            raise ValueError(
                f"linear {self.name!r}: its weight has the shape {list(weight.shape)}, "
                f"{list(self.shape)} was made: set the whole matrix, tensor ranks cut it later"
            )
        if any(height % tensor.size for height in self.sections):
            raise ValueError(
                f"linear {self.name!r}: sections {list(self.sections)} over {tensor.size} tensor "
                "ranks"
            )
        part = slice_weight(weight, self.shard.kind, tensor.index, tensor.size, self.sections)
        weight.data = part
        mark_sharded(weight)


class _CopyToShards(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _summed(grad, ctx.group), None


class _SumOfShards(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        return _summed(x, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


def _summed(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    total = x.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(total, group=group)
    return total
