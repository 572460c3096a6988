"""What happens to gradients between the last backward pass and the optimizer.

DeepSpeed's engines call these hooks once a step, on every rank and in this order:

1. ``exchange``: find out which local gradients are non-finite, then average the flat
   gradient of each parameter group over the replicas. With a sharded optimizer (ZeRO 1) a
   rank gets the mean of its own part alone. With sharded gradients (ZeRO 2) there is no flat
   gradient, and ``reduce`` does this for each of DeepSpeed's buckets in every micro-batch.
2. ``before_update``: reduce the FP8 layers' amax over all ranks of this stage.
3. DeepSpeed takes the gradient norm, of a sharded gradient from ``owned_norm``; if it is not
   finite it leaves the update out.
4. ``after_update``: close the step of the FP8 scaling state, with or without the update.

Promises: on a step whose gradients are finite nothing here waits for the device. The names
of non-finite gradients must be found before the exchange, which spreads one replica's NaN to
all; so every parameter's local norm is taken then, in one fused pass that reads the gradient
once, and stays on the device. It is read only when DeepSpeed, which looks at the global norm on
the host anyway, has left the update out. By that measure, as by DeepSpeed's, a gradient beyond
1e19 whose square overflows FP32 is not finite either.

DeepSpeed counts what several ranks hold alike (over tensor ranks; tied over stages) in the norm
of one of them. A non-finite value in the copy of another would pass unseen there, so it is
carried over to a gradient that counts.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from parallel.gradients import GradientExchange
from parallel.precision.backend import LayerScope


@dataclass(frozen=True, slots=True)
class BucketPiece:
    """One parameter's gradient in a bucket of DeepSpeed's, behind the piece before it."""

    group: int
    """Index of its group."""
    parameter: int
    """Its index there."""
    start: int
    """Where it begins in its group's flat parameters."""
    numel: int


@dataclass(frozen=True, slots=True)
class GradientGroup:
    """One parameter group: its flat gradient is exchanged as a whole."""

    name: str
    """One of ``parallel.parameter_groups``."""
    exchange: GradientExchange
    parameters: tuple[str, ...]
    """Names, in the order in which the flat gradient holds them."""
    views: tuple[Tensor, ...]
    """FP32 view of each parameter's gradient in the flat buffer; none under ZeRO 2."""
    numel: int = 0
    """Elements of the parameters together."""
    partition: int = 0
    """Under ZeRO 2, elements of the flat parameters that each replica owns."""
    compressed: bool = True
    """Whether the job's gradient dtype applies; otherwise it goes in FP32."""
    counted: bool = True
    """Whether DeepSpeed counts it in the gradient norm."""
    owned: tuple[Tensor, ...] | None = None
    """Where the optimizer is sharded over the replicas, and so the exchange scattered: what
    this rank owns of the gradients that DeepSpeed counts here; else None."""


class StepHooks:
    """The hooks of one rank."""

    def __init__(
        self,
        scope: LayerScope,
        groups: Sequence[GradientGroup],
        replicas: dist.ProcessGroup,
        stage: dist.ProcessGroup | None = None,
    ) -> None:
        """``replicas``: the data-parallel ranks that hold the same parameters; ``stage``: the
        tensor × data ranks that hold the same linears, None when there are no others.

        The first group is one that DeepSpeed counts on every rank.
        """
        self._scope = scope
        self._groups = tuple(groups)
        self._replicas = replicas
        self._stage = stage
        self._exchanging = dist.get_world_size(replicas) > 1
        self._norms: list[Tensor] = []
        self._residuals: list[Tensor] = []
        self._poison = False
        self._calls = 0

    def poison_gradient(self) -> None:
        """Put a NaN into one local gradient of the next step, before the exchange."""
        self._poison = True

    def exchange(self, flats: Sequence[Tensor]) -> None:
        """Average each group's flat FP32 gradient in place, in the order of the groups."""
        if len(flats) != len(self._groups):
            raise RuntimeError(
                f"DeepSpeed exchanges {len(flats)} buffers for {len(self._groups)} groups"
            )
        if self._poison:
            flats[0][0] = torch.nan
            self._poison = False
        views = [view for group in self._groups for view in group.views]
        self._norms = list(torch._foreach_norm(views))
        self._carry_nonfinite(flats[0])
        self._calls += 1
        if self._exchanging:
            self._residuals = [residual.clone() for residual in self._live_residuals()]
            for flat, group in zip(flats, self._groups, strict=True):
                group.exchange.mean_(flat)

    def reduce(self, bucket: Tensor, pieces: Sequence[BucketPiece]) -> Tensor:
        """The mean over the replicas of a bucket of gradients; float32, of the same size.

        What other replicas own may be left as it was, or be averaged too.
        ``bucket`` is what ``pieces`` say, in their order. All replicas reduce the same
        buckets, as often as they like in a step.
        """
        if self._poison:
            bucket[0] = torch.nan
            self._poison = False
        if not self._calls:
            self._norms = [bucket.new_zeros((), dtype=torch.float32) for _ in self._names()]
        self._calls += 1
        mean = bucket.float()
        parts = mean.split([piece.numel for piece in pieces])
        first = [0, *itertools.accumulate(len(group.parameters) for group in self._groups)]
        for piece, norm in zip(pieces, torch._foreach_norm(parts), strict=True):
            number = first[piece.group] + piece.parameter
            self._norms[number] = self._norms[number] + norm
        if self._exchanging:
            for i, group in enumerate(self._groups):
                mine = [
                    (at.start, part)
                    for part, at in zip(parts, pieces, strict=True)
                    if at.group == i
                ]
                if mine:
                    self._reduce_group(group, mine)
        return mean

    def _reduce_group(self, group: GradientGroup, parts: Sequence[tuple[int, Tensor]]) -> None:
        """Average ``parts`` in place, each with where it begins in the flat parameters."""
        rank, ranks = dist.get_rank(self._replicas), dist.get_world_size(self._replicas)
        owned = [list(_within(parts, r * group.partition, group.partition)) for r in range(ranks)]
        widest = max(sum(piece.numel() for piece in row) for row in owned)
        numel = sum(part.numel() for _, part in parts)
        # Rows as wide as the widest go once each, the whole goes twice without such padding.
        # A bucket that few replicas own is slower the first way.
        if ranks * widest < 2 * numel:
            rows = parts[0][1].new_zeros((ranks, widest))
            for row, pieces in zip(rows, owned, strict=True):
                if pieces:
                    torch.cat(pieces, out=row[: sum(piece.numel() for piece in pieces)])
            group.exchange.mean_(rows.view(-1), scattered=True)
            taken, means = owned[rank], rows[rank]
        else:
            means = torch.cat([part for _, part in parts])
            group.exchange.mean_(means)
            taken = [part for _, part in parts]
        sizes = [piece.numel() for piece in taken]
        if taken:
            torch._foreach_copy_(taken, means[: sum(sizes)].split(sizes))

    @property
    def scattered(self) -> bool:
        """Whether a rank has the mean of its own part of the gradients alone."""
        return any(group.owned is not None for group in self._groups)

    def owned_norm(self) -> Tensor:
        """The 2-norm of what DeepSpeed counts on this rank and on its replicas; float32 [1].

        A collective of the replicas, with the same bits on all of them; not finite if a
        gradient on any of them is not.
        """
        owned = [piece for group in self._groups for piece in group.owned or ()]
        square = (
            torch.stack(torch._foreach_norm(owned)).square_().sum()
            if owned
            else self._groups[0].views[0].new_zeros(())
        )
        dist.all_reduce(square, group=self._replicas)
        return square.sqrt_().view(1)

    def before_update(self) -> None:
        """Reduce this step's amax over the ranks of the stage."""
        by_bucket = not any(group.views for group in self._groups)
        if self._calls != 1 and not (by_bucket and self._calls):
            # A DeepSpeed that reduces elsewhere would train on unaveraged gradients in silence.
            raise RuntimeError(f"gradients were exchanged {self._calls} times in one step")
        self._calls = 0
        self._scope.reduce_amax(self._stage)

    def after_update(self, applied: bool) -> None:
        """Close the step; ``applied`` is whether the weights changed.

        If not, scaling state and error feedback are as before the step.
        """
        self._scope.finish_step(applied)
        if not applied:
            for residual, before in zip(self._live_residuals(), self._residuals, strict=True):
                residual.copy_(before)

    def _carry_nonfinite(self, counted: Tensor) -> None:
        """Make ``counted`` NaN if a gradient that isn't in this rank's norm isn't finite."""
        numbers = iter(self._norms)
        unseen = [
            norm
            for group in self._groups
            for norm in [next(numbers) for _ in group.views]
            if not group.counted
        ]
        if unseen:
            # 0 for finite norms, so that nothing changes; NaN for Inf and NaN.
            counted[0] += torch.stack(unseen).mul_(0.0).sum()

    def _live_residuals(self) -> list[Tensor]:
        """Error feedback of all groups; none when it is off."""
        return [
            residual
            for group in self._groups
            for residual in group.exchange.state_tensors().values()
        ]

    def nonfinite_parameters(self) -> tuple[str, ...]:
        """Names of the parameters whose gradient on this rank was not finite, in this step.

        Waits for the device: ask only when the update was left out.
        """
        finite = torch.stack(self._norms).isfinite().tolist()
        return tuple(name for name, ok in zip(self._names(), finite, strict=True) if not ok)

    def _names(self) -> list[str]:
        return [name for group in self._groups for name in group.parameters]


def _within(parts: Sequence[tuple[int, Tensor]], begin: int, numel: int) -> Iterator[Tensor]:
    """What of ``parts`` lies in [begin, begin + numel) of the flat parameters; views."""
    for start, part in parts:
        low, high = max(start, begin), min(start + part.numel(), begin + numel)
        if low < high:
            yield part[low - start : high - start]
