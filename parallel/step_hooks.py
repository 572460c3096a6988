"""What happens to gradients between the last backward pass and the optimizer.

DeepSpeed's engines call these hooks once a step, on every rank and in this order:

1. ``exchange``: find out which local gradients are non-finite, then average the flat
   gradient of each parameter group over the replicas. With a sharded optimizer (ZeRO 1) a
   rank gets the mean of its own part alone. DeepSpeedZeroOptimizer has no flat gradients, and
   ``reduce`` does this for each of its buckets: once a step, or under ZeRO 2 in every
   micro-batch.
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

from parallel.compute_clock import ComputeClock
from parallel.config import EXCHANGE_BITS, ExchangeDtype
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
    """View of each parameter's gradient in the flat buffer; none where gradients come in
    buckets."""
    numel: int = 0
    """Elements of what is exchanged: the parameters and what pads their flat buffer."""
    partition: int = 0
    """Where gradients come in buckets, elements of the flat parameters each replica owns."""
    least: ExchangeDtype = "fp8"
    """What it is exchanged in at least, whatever the job's gradients travel in."""
    residual: Tensor | None = None
    """Error feedback of the flat parameters, float32; None where it is off."""
    counted: bool = True
    """Whether DeepSpeed counts it in the gradient norm."""
    owned: tuple[Tensor, ...] | None = None
    """Where the optimizer is sharded over the replicas, and so the exchange scattered: what
    this rank owns of the gradients that DeepSpeed counts here; else None."""

    def take_dtype(self, dtype: ExchangeDtype) -> None:
        """Exchange in the job's ``dtype`` from here on, or in a wider one where it must be."""
        self.exchange.dtype = max(dtype, self.least, key=EXCHANGE_BITS.__getitem__)


class StepHooks:
    """The hooks of one rank."""

    def __init__(
        self,
        scope: LayerScope,
        groups: Sequence[GradientGroup],
        replicas: dist.ProcessGroup,
        stage: dist.ProcessGroup | None = None,
        clock: ComputeClock | None = None,
    ) -> None:
        """``replicas``: the data-parallel ranks that hold the same parameters; ``stage``: the
        tensor × data ranks that hold the same linears, None when there are no others.

        The first group is one that DeepSpeed counts on every rank.
        """
        self.clock = clock or ComputeClock()
        """Doesn't count the exchange, which a backward pass may be waiting in."""
        self._scope = scope
        self._groups = tuple(groups)
        self._replicas = replicas
        self._stage = stage
        self._exchanging = dist.get_world_size(replicas) > 1
        self._norms: list[Tensor] = []
        self._residuals: list[tuple[Tensor, Tensor]] = []
        """Live error feedback, and what it was before the step."""
        self._poison: float | None = None
        self._calls = 0

    def poison_gradient(self, value: float) -> None:
        """Put ``value`` into one local gradient of the next step, before the exchange."""
        self._poison = value

    def exchange(self, flats: Sequence[Tensor]) -> None:
        """Average each group's flat FP32 gradient in place, in the order of the groups."""
        if len(flats) != len(self._groups):
            raise RuntimeError(
                f"DeepSpeed exchanges {len(flats)} buffers for {len(self._groups)} groups"
            )
        if self._poison is not None:
            flats[0][0] = self._poison
            self._poison = None
        views = [view for group in self._groups for view in group.views]
        self._norms = list(torch._foreach_norm(views))
        self._carry_nonfinite(flats[0])
        self._calls += 1
        self._keep_residuals()
        if self._exchanging:
            with self.clock.paused():
                for flat, group in zip(flats, self._groups, strict=True):
                    group.exchange.mean_(flat, residual=group.residual)

    def reduce(self, bucket: Tensor, pieces: Sequence[BucketPiece]) -> Tensor:
        """The mean over the replicas of a bucket of gradients; float32, of the same size.

        What other replicas own may be left as it was, or be averaged too.
        ``bucket`` is what ``pieces`` say, in their order. All replicas reduce the same
        buckets, as often as they like in a step.
        """
        if self._poison is not None:
            bucket[0] = self._poison
            self._poison = None
        if not self._calls:
            self._norms = [bucket.new_zeros((), dtype=torch.float32) for _ in self._names()]
            self._keep_residuals()
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
                    with self.clock.paused():
                        self._reduce_group(group, mine)
        return mean

    def _reduce_group(self, group: GradientGroup, parts: Sequence[tuple[int, Tensor]]) -> None:
        """Average ``parts`` in place, each with where it begins in the flat parameters."""
        rank, ranks = dist.get_rank(self._replicas), dist.get_world_size(self._replicas)
        owned = _by_owner(parts, ranks, group.partition)
        widest = max(sum(piece.numel() for piece in row) for row in owned)
        numel = sum(part.numel() for _, part in parts)
        scattered = goes_scattered(ranks, widest, numel)
        width = widest if scattered else numel
        rows = owned if scattered else [[part for _, part in parts]]
        means = _flat_rows(rows, width)
        if group.residual is None or group.exchange.dtype != "fp8":
            group.exchange.mean_(means, scattered=scattered)
        else:
            left = [(i, group.residual[i : i + part.numel()]) for i, part in parts]
            live = (
                _by_owner(left, ranks, group.partition)
                if scattered
                else [[piece for _, piece in left]]
            )
            residual = _flat_rows(live, width)
            group.exchange.mean_(means, residual=residual, scattered=scattered)
            for row, pieces in zip(residual.split(width), live, strict=True):
                _copy_back(row, pieces)
        mine = rank if scattered else 0
        _copy_back(means.split(width)[mine], rows[mine])

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
            for residual, before in self._residuals:
                residual.copy_(before)
        self._residuals = []

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

    def _keep_residuals(self) -> None:
        """Keep error feedback as it is before this step, in case its update is left out."""
        self._residuals = [
            (group.residual, group.residual.clone())
            for group in self._groups
            if group.residual is not None and group.exchange.dtype == "fp8"
        ]

    def nonfinite_parameters(self) -> tuple[str, ...]:
        """Names of the parameters whose gradient on this rank was not finite, in this step.

        Waits for the device: ask only when the update was left out.
        """
        finite = torch.stack(self._norms).isfinite().tolist()
        return tuple(name for name, ok in zip(self._names(), finite, strict=True) if not ok)

    def _names(self) -> list[str]:
        return [name for group in self._groups for name in group.parameters]


def goes_scattered(ranks: int, widest: int, numel: int) -> bool:
    """Whether ``numel`` gradients, of which a rank owns ``widest`` at most, go in rows. Pure.

    Rows as wide as the widest go once each, the whole goes twice without such padding: a bucket
    that few replicas own is slower the first way.
    """
    return ranks * widest < 2 * numel


def _flat_rows(rows: Sequence[Sequence[Tensor]], width: int) -> Tensor:
    """[rows · width], each row's pieces one behind the other and zeros behind them."""
    flat = next(piece for row in rows for piece in row).new_zeros(len(rows), width)
    for row, pieces in zip(flat, rows, strict=True):
        if pieces:
            torch.cat(list(pieces), out=row[: sum(piece.numel() for piece in pieces)])
    return flat.view(-1)


def _copy_back(flat: Tensor, pieces: Sequence[Tensor]) -> None:
    """Copy to ``pieces`` what stands one behind the other at the beginning of ``flat``."""
    if pieces:
        sizes = [piece.numel() for piece in pieces]
        torch._foreach_copy_(list(pieces), flat[: sum(sizes)].split(sizes))


def _by_owner(
    parts: Sequence[tuple[int, Tensor]], ranks: int, partition: int
) -> list[list[Tensor]]:
    """What of ``parts`` each rank owns, ``partition`` of the flat parameters each; views."""
    return [list(_within(parts, rank * partition, partition)) for rank in range(ranks)]


def _within(parts: Sequence[tuple[int, Tensor]], begin: int, numel: int) -> Iterator[Tensor]:
    """What of ``parts`` lies in [begin, begin + numel) of the flat parameters; views."""
    for start, part in parts:
        low, high = max(start, begin), min(start + part.numel(), begin + numel)
        if low < high:
            yield part[low - start : high - start]
